"""Which tools may, or must, be called; and what of it is refused."""

from typing import Any

import httpx
import pytest

from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, CALL_NOW, HERMES, NOW, TOOL, URL, answer, body, chunks, error

pytestmark = pytest.mark.usefixtures("calls_and_thinks")


async def test_the_choice_none_names_no_tools_and_parses_no_calls(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    choice = (await answer(client, CALL, tool_choice="none"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


async def test_allowed_tools_keep_the_others_from_being_called(client: httpx.AsyncClient) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = (await answer(client, CALL + CALL_NOW, tool_choice=choice))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]
    assert message["content"] == CALL


CUSTOM = {"type": "custom", "custom": {"name": "x"}}
NAMED = {"type": "function", "function": {"name": "now"}}
REQUIRED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def allowed(mode: str, *names: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(names)}}


NO_OBJECT = {"type": "function", "function": {"name": "a", "parameters": []}}
NO_OBJECT_SCHEMA = {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", None),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", None),
        ({"tool_choice": "any"}, "tool_choice", None),
        ({"tool_choice": 1}, "tool_choice", None),
        ({"tool_choice": "required", "tools": []}, "tool_choice", None),
        ({"tool_choice": NAMED, "tools": None}, "tool_choice", None),
        ({"tools": [TOOL, TOOL]}, "tools", None),
        ({"tools": [{"type": "x", "function": {"name": "x"}}]}, "tools[0].type", None),
        ({"tools": [CUSTOM], "tool_choice": "required"}, "tool_choice", None),
        ({"tools": [TOOL, CUSTOM], "tool_choice": CUSTOM}, "tool_choice.type", None),
        ({"tool_choice": allowed("required", CUSTOM)}, "tool_choice.allowed_tools.tools", None),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", None),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [NO_OBJECT]}, "tools[0].function.parameters", None),
        ({"tools": [NO_OBJECT_SCHEMA]}, "tools[0].function.parameters", None),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "\0"}}]}, "tools", None),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, code: str | None
) -> None:
    found = await error(client, body("a") | fields)
    assert (found["param"], found["code"]) == (param, code), found["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("choice", "names", "finish"),
    [
        ("required", ["get_weather", "now"], "tool_calls"),
        (NAMED, ["now"], "stop"),
        ({"type": "function", "name": "now"}, ["now"], "stop"),
        (REQUIRED, ["now"], "tool_calls"),
    ],
)
async def test_a_forced_call_is_a_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, choice: Any, names: list[str], finish: str
) -> None:
    found = (await answer(client, f"<think>Hm.</think>{CALL_NOW}", tool_choice=choice))["choices"][0]
    assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["now"]
    assert found["finish_reason"] == finish
    sampling = engine.requests[-1].sampling
    assert sampling.grammar is not None and sampling.grammar.kind == "lark"
    told = [name for name in ("get_weather", "now") if f'\\"name\\": \\"{name}\\"' in sampling.grammar.source]
    assert told == names
    assert sampling.reasoning is not None, "the grammar binds what follows"


async def test_tools_that_are_no_functions_are_left_out(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for choice, names in (
        (None, ["now"]),
        ("required", ["now"]),
        (allowed("auto", CUSTOM, NAMED), ["now"]),
        (allowed("auto", CUSTOM), None),
    ):
        found = (await answer(client, CALL_NOW, tools=[CUSTOM, NOW], tool_choice=choice))["choices"][0]
        options = engine.tokenizer.chats[-1][1]["template_kwargs"]
        listed = [tool["function"]["name"] for tool in options["tools"]] if "tools" in options else None
        called = [call["function"]["name"] for call in found["message"].get("tool_calls", ())] or None
        assert listed == called == names
    await answer(client, "a", tools=[CUSTOM], tool_choice="auto")
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_an_answer_ends_with_a_call_that_repeats_another(
    client: httpx.AsyncClient, choice: str
) -> None:
    say = f"{CALL}\n{CALL_NOW}\n" + f"{CALL}\n" * 20
    plain = (await answer(client, say, tool_choice=choice))["choices"][0]
    assert plain["finish_reason"] == "tool_calls"
    names = [call["function"]["name"] for call in plain["message"]["tool_calls"]]
    assert names == ["get_weather", "now", "get_weather"]
    streamed = await chunks(client, say, tool_choice=choice)
    parts = [
        part
        for chunk in streamed
        for part in chunk["choices"][0]["delta"].get("tool_calls", ())
        if "id" in part
    ]
    assert [part["function"]["name"] for part in parts] == names
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_choice_is_no_grammar(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": ALLOWED}):
        await answer(client, "a", **fields)
        assert engine.requests[-1].sampling.grammar is None


JSON = {"response_format": {"type": "json_object"}}


async def test_calls_may_stand_in_place_of_json(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = (await answer(client, CALL_NOW, **JSON))["choices"][0]
    assert [call["function"]["name"] for call in found["message"]["tool_calls"]] == ["now"]
    found = (await answer(client, "{}", **JSON))["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("{}", "stop")
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_object"
    assert "get_weather" in grammar.around and "now" in grammar.around
    await answer(client, "{}", tool_choice=ALLOWED, **JSON)
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and "get_weather" not in grammar.around
    await answer(client, "{}", tool_choice="none", **JSON)
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and not grammar.around


async def test_a_demanded_call_leaves_no_place_for_json(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await answer(client, CALL_NOW, tool_choice="required", **JSON)
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "lark"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_what_is_no_json_is_not_told_from_calls(client: httpx.AsyncClient, choice: str) -> None:
    found = await error(client, body("a", tool_choice=choice, guided_regex="a+"))
    assert found["param"] == "guided_regex"


async def test_formats_without_a_grammar_write_demanded_calls_as_hermes(engine: FakeEngine) -> None:
    async with client_for(engine, tool_parser="pythonic") as client:
        found = (await answer(client, CALL_NOW, tool_choice="required"))["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        found = (await answer(client, "[now()]"))["choices"][0]
        assert found["finish_reason"] == "tool_calls"


async def test_text_that_must_follow_a_pattern_is_written_as_json_in_hermes(engine: FakeEngine) -> None:
    own = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    hermes = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>'
    async with client_for(engine, tool_parser="qwen3_coder") as client:
        for schema, say in (({"type": "string"}, own), ({"type": "string", "pattern": "1"}, hermes)):
            tool = {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"a": schema}}},
            }
            choice = (await answer(client, say, tool, tool_choice="required"))["choices"][0]
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "1"}'
            grammar = engine.requests[-1].sampling.grammar
            assert grammar is not None and ("<function=" in grammar.source) is (say == own)


async def test_no_tools_and_auto_are_no_choice(client: httpx.AsyncClient) -> None:
    for fields in (
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
    ):
        response = await client.post(URL, json=body("a") | fields)
        assert response.status_code == 200, response.text


async def test_a_model_whose_format_is_unknown_refuses_tools(engine: FakeEngine) -> None:
    for template, setting in (("{{ tools }}", "auto"), (HERMES, "none"), ("no place", "glm45")):
        engine.tokenizer.chat_template = template
        async with client_for(engine, tool_parser=setting) as client:
            for url in (URL, "/tokenize"):  # which agree
                response = await client.post(url, json=body("a"))
                assert response.status_code == 400, response.text
                found = response.json()["error"]
                assert (found["param"], found["code"]) == ("tools", "unsupported_parameter")


async def test_deep_schemas_are_refused(client: httpx.AsyncClient) -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"properties": schema}
    found = await error(
        client, body("a", {"type": "function", "function": {"name": "f", "parameters": schema}})
    )
    assert found["param"] == "tools"
