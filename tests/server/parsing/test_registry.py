"""A format is one file and one entry in a list."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.constraints.grammar import compile_grammar
from engine.request import Grammar
from server.parsing import formats
from server.parsing.formats import reasoning_formats, tool_formats
from server.parsing.reasoning import ReasoningParser
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.parsing.test_tool_call_grammar import Writer
from tests.server.tool_chat import answer, chunks

TOY = "tests.server.parsing.toy_format:ToyParser"
SAY = 'Look: call!{"name": "get_weather", "arguments": {"city": "Rome"}}'


@pytest.fixture
async def toy_client(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(formats, "TOOL_FORMATS", (*formats.TOOL_FORMATS, TOY))
    engine.tokenizer.chat_template = "{{ messages }}{{ tools }}call!"
    async with client_for(engine) as client:
        yield client


async def streamed_calls(client: httpx.AsyncClient, say: str, **fields: Any) -> list[tuple[str, str]]:
    """Return the names and arguments of a streamed answer."""
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks(client, say, **fields)]
    calls: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append((part["function"]["name"], ""))
        name, arguments = calls.pop()
        calls.append((name, arguments + part["function"]["arguments"]))
    return calls


async def test_a_new_format_needs_one_file_and_one_entry(
    toy_client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    expected = [("get_weather", '{"city": "Rome"}')]
    assert await streamed_calls(toy_client, SAY) == expected
    message = (await answer(toy_client, SAY))["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("Look:", 1)
    call = SAY.removeprefix("Look: ")
    assert await streamed_calls(toy_client, call, tool_choice="required") == expected
    grammar = engine.requests[-1].sampling.grammar
    assert isinstance(grammar, Grammar)
    writer = Writer(())
    compile_grammar(grammar, writer.vocabulary)
    assert writer.is_allowed(grammar, call) and writer.is_allowed(grammar, call * 2)
    assert not writer.is_allowed(grammar, SAY)


@pytest.mark.parametrize("parser", [*tool_formats().values(), *reasoning_formats().values()])
def test_a_format_declares_all_that_is_read_off_it(parser: Any) -> None:
    own = vars(parser)
    assert re.fullmatch(r"[a-z0-9_]+", own["name"])
    for texts in (own["template_signs"], own["markers"]):
        assert texts and all(isinstance(text, str) and text for text in texts)
    assert parser.is_shown_by(f"{{{{ messages }}}}{own['template_signs'][0]}")
    if issubclass(parser, ReasoningParser):
        assert len(own["markers"]) == 2, "the opening and the closing one"
        return
    rules = parser.call_rules({})
    assert rules is None or all((rules.call, rules.tool, "{}" in rules.around))


def test_formats_have_files_and_names_of_their_own() -> None:
    entries = [*formats.TOOL_FORMATS, *formats.REASONING_FORMATS]
    modules = [entry.partition(":")[0].rpartition(".")[2] for entry in entries]
    folder = Path(formats.__file__).parent
    others = {"__init__", "response_template"}
    assert sorted(modules) == sorted({path.stem for path in folder.glob("*.py")} - others)
    assert len(tool_formats()) == len(formats.TOOL_FORMATS)
    assert len(reasoning_formats()) == len(formats.REASONING_FORMATS)


def test_only_a_format_itself_and_the_default_are_named_elsewhere() -> None:
    """Shared code does not branch on a format; prompts without tool support and fallbacks use Hermes."""
    names = set(tool_formats()) - {"hermes"}
    for path in Path(formats.__file__).parent.parent.glob("*.py"):
        assert not {name for name in names if json.dumps(name) in path.read_text(encoding="utf-8")}, path
