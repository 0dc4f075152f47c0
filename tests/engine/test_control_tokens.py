"""Control tokens are marked by a noncharacter that one module handles."""

from pathlib import Path

from engine.control_tokens import MARK, is_marked, mark, strip, until

ROOT = Path(__file__).parent.parent.parent


def test_a_marked_text_is_told_from_one_that_spells_it() -> None:
    marked = mark("<call>")
    assert is_marked(marked) and not is_marked("<call>") and not is_marked("")
    assert strip(f"<call>{marked}") == "<call><call>"


def test_patterns_stop_at_a_control_token() -> None:
    found = until(",)").match(f"a<b{mark('<x>')}, c")
    assert found is not None and found[0] == "a<b"


def test_no_other_module_handles_the_mark() -> None:
    for floor in ("engine", "server"):
        for path in (ROOT / floor).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert path.name == "control_tokens.py" or ("import MARK" not in text and MARK not in text), path
            assert path.name == "control_tokens.py" or "ufdd0" not in text.lower(), path
