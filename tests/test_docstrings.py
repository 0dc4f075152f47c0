"""Checks the docstrings of the product for phrases that do not make sense alone, in an editor's hover."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = ("server", "engine", "models", "kernels")
PHRASES = re.compile(
    r"^(?:The same|Whether|What is)\b"
    r"|\b(?:told|tells?|nobody|wanted|behind|stands?|so many|in circles)\b"
)
# Numbers of docstrings that still have such a phrase, by module. They may only become smaller; a module that
# is not listed has none.
KNOWN = Path(__file__).with_suffix(".json")


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a module, its classes and its functions, each on one line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented)
    ]
    return [" ".join(text.split()) for node in nodes if (text := ast.get_docstring(node))]


def offenders() -> dict[str, list[str]]:
    """Return the docstrings with such a phrase, by module."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        if texts := [text for text in docstrings(path) if PHRASES.search(text)]:
            found[path.relative_to(ROOT).as_posix()] = texts
    return found


def test_no_new_docstring_has_such_a_phrase() -> None:
    known: dict[str, int] = json.loads(KNOWN.read_text())
    for module, texts in offenders().items():
        listing = "\n".join(f"  {text[:100]}" for text in texts)
        assert len(texts) <= known.get(module, 0), (
            f"{module}: say it in the words of CONTRIBUTING.md:\n{listing}"
        )


def test_no_number_is_larger_than_needed() -> None:
    known = Counter(json.loads(KNOWN.read_text()))
    found = {module: len(texts) for module, texts in offenders().items()}
    fewer = {module: found.get(module, 0) for module in known if known[module] > found.get(module, 0)}
    assert not fewer, f"lower the numbers in {KNOWN.name} (remove those that are 0): {json.dumps(fewer)}"
