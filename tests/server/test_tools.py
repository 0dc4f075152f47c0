"""Tools and reasoning in chat, over ASGI, by hand and with OpenAI's client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from engine.outputs import MARK
from engine.request import ReasoningSpan
from server.schema.chat import ChatChunk, ChatResponse
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine

URL = "/v1/chat/completions"
HERMES = "{{ messages }}{{ tools }}<tool_call>"
THINKING = HERMES + "<think>"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def engine() -> FakeEngine:
    """An engine whose model calls tools in Hermes' format and thinks first."""
    found = FakeEngine()
    found.tokenizer.chat_template = THINKING
    return found


@pytest.fixture
async def openai_client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of an application around `engine`."""
    http = client_for(engine)
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
    ) as found:
        yield found


def body(say: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request for an answer that is `say`."""
    messages = [{"role": "user", "content": f"say:{say}"}]
    return {"messages": messages, "tools": list(tools) or [TOOL, NOW], **fields}


async def answer(client: httpx.AsyncClient, say: str, *tools: dict[str, Any], **fields: Any) -> Any:
    response = await client.post(URL, json=body(say, *tools, **fields))
    assert response.status_code == 200, response.text
    ChatResponse.model_validate(response.json())
    return response.json()


async def chunks(client: httpx.AsyncClient, say: str, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=body(say, stream=True, **fields))
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    parsed = [json.loads(line) for line in lines[:-1]]
    for chunk in parsed:
        ChatChunk.model_validate(chunk)
    return parsed


async def error(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(URL, json=request)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


# Answers


async def test_a_call_stands_in_the_message(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, f"I look.\n{CALL}\n{CALL_NOW}"))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)


async def test_without_words_the_content_is_null_and_without_calls_there_is_no_list(
    client: httpx.AsyncClient,
) -> None:
    message = (await answer(client, CALL))["choices"][0]["message"]
    assert message["content"] is None
    choice = (await answer(client, "No need."))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "No need.", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_what_is_no_call_is_content(client: httpx.AsyncClient) -> None:
    for say in ("<tool_call>oops</tool_call>", "a <tool_call", '<tool_call>{"name": 1}</tool_call>'):
        choice = (await answer(client, say))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (say, "stop")


async def test_reasoning_is_a_field_of_its_own(client: httpx.AsyncClient) -> None:
    whole = await answer(client, f"<think>\nHm.\n</think>\n\nI look.{CALL}")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert len(message["tool_calls"]) == 1
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}


async def test_reasoning_may_be_left_out_or_left_in(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    say = "<think>Hm.</think>4"
    hidden = await answer(client, say, include_reasoning=False)
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "4", "refusal": None}
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    left_in = await answer(client, say, separate_reasoning=False)
    assert left_in["choices"][0]["message"]["content"] == say
    assert engine.requests[-1].sampling.reasoning is None


async def test_a_template_that_has_begun_to_think(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    request = {
        "messages": [
            {"role": "user", "content": "say:Hm.</think>4"},
            {"role": "system", "content": "<think>\n"},
        ]
    }
    response = await client.post(URL, json=request)
    # The fake model repeats the whole of its prompt after `say:`.
    message = response.json()["choices"][0]["message"]
    assert engine.requests[-1].sampling.reasoning == ReasoningSpan("<think>", "</think>", is_open=True)
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "4 <think>\n"


async def test_a_turn_that_goes_on_in_its_reasoning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for text, is_open in (("<think>I", True), ("<think>I</think>so", False), ("so", False)):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        request = {"messages": messages, "continue_final_message": True}
        assert (await client.post(URL, json=request)).status_code == 200
        span = engine.requests[-1].sampling.reasoning
        assert span is not None and span.is_open is is_open


async def test_an_answer_cut_in_a_call_keeps_its_length_visible(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, CALL, max_tokens=60))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Paris"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_a_stop_string_in_a_call_is_no_call(client: httpx.AsyncClient) -> None:
    choice = (await answer(client, CALL, stop=["r"]))["choices"][0]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_the_answer_ends_after_the_first(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    say = f"{CALL}\n{CALL_NOW}" + " and more" * 100
    if stream:
        parsed = await chunks(client, say, parallel_tool_calls=False)
        names = [
            call["function"]["name"]
            for chunk in parsed
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
            if "name" in call["function"]
        ]
        assert names == ["get_weather"]
        finish = parsed[-1]["choices"][0]["finish_reason"]
    else:
        choice = (await answer(client, say, parallel_tool_calls=False))["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
        finish = choice["finish_reason"]
    assert finish == "tool_calls"
    assert engine.aborted, "the rest is not computed"
    assert not engine.live


# Streams


async def test_a_streamed_call_tells_its_name_once_and_its_arguments_in_pieces(
    client: httpx.AsyncClient,
) -> None:
    say = f"<think>\nHm.\n</think>\nI look.\n{CALL}\n{CALL_NOW}"
    parsed = await chunks(client, say, stream_options={"include_usage": True})
    assert parsed[-1]["choices"] == [] and parsed[-1]["usage"]["completion_tokens"] == len(say)
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in begun] == [
        (0, "function", {"name": "get_weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    more = [call for call in calls if "id" not in call]
    assert all(
        call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in more
    )
    for index, arguments in enumerate(['{"city": "Paris"}', "{}"]):
        pieces = [call["function"]["arguments"] for call in more if call["index"] == index]
        assert "".join(pieces) == arguments
        assert len(pieces) > 1, "as they are written"
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed[:-1]].count(None) == len(deltas) - 1
    assert parsed[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_stream_and_answer_say_the_same(client: httpx.AsyncClient) -> None:
    say = f"<think>Hm.</think>A {CALL} B <tool_call>no {CALL_NOW}"
    message = (await answer(client, say))["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks(client, say)]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    for index, call in enumerate(message["tool_calls"]):
        pieces = [
            piece["function"]["arguments"]
            for delta in deltas
            for piece in delta.get("tool_calls", ())
            if piece["index"] == index
        ]
        assert "".join(pieces) == call["function"]["arguments"]


async def test_told_tokens_stand_beside_reasoning_and_calls(client: httpx.AsyncClient) -> None:
    say = f"<think>Hm.</think>I look.\n{CALL}"
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = (await answer(client, say, **fields))["choices"][0]
    assert "".join(token["token"] for token in choice["logprobs"]["content"]) == say
    assert choice["token_ids"] == [ord(char) for char in say]
    parsed = await chunks(client, say, **fields)
    choices = [chunk["choices"][0] for chunk in parsed]
    told = [token for found in choices for token in (found["logprobs"] or {"content": []})["content"]]
    assert told == choice["logprobs"]["content"], "each once, and in order"
    assert [i for found in choices for i in found.get("token_ids", ())] == choice["token_ids"]
    deltas = [found["delta"] for found in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert [found["finish_reason"] for found in choices if found["finish_reason"]] == ["tool_calls"]


async def test_every_choice_has_a_parser_of_its_own(client: httpx.AsyncClient) -> None:
    parsed = await chunks(client, CALL, n=3)
    ids: dict[int, set[str]] = {0: set(), 1: set(), 2: set()}
    for chunk in parsed:
        choice = chunk["choices"][0]
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == 0
            if "id" in call:
                ids[choice["index"]].add(call["id"])
    assert all(len(found) == 1 for found in ids.values())
    assert len(set.union(*ids.values())) == 3


async def test_counts_go_along_when_asked_for(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parsed = await chunks(client, f"<think>a</think>{CALL}", stream_options=options)
    assert all(chunk["usage"] is not None for chunk in parsed)


async def test_chunks_of_content_are_the_plain_ones_while_nothing_is_parsed(
    client: httpx.AsyncClient,
) -> None:
    with_parser = await chunks(client, "plain text")
    client_fields = {"separate_reasoning": False, "tool_choice": "none"}
    without = await chunks(client, "plain text", **client_fields)

    def bare(chunk: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in chunk.items() if name not in ("id", "created")}

    joined = [
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)
        for found in (with_parser, without)
    ]
    assert joined == ["plain text", "plain text"]
    assert bare(with_parser[1]).keys() == bare(without[1]).keys()


# What the engine and the template are told


async def test_control_tokens_are_told_to_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.added_tokens = {"<tool_call>": 7, "</tool_call>": 8, "<think>": 9, "<other>": 10}
    async with client_for(engine) as client:
        say = f"<think>as text{MARK}{CALL}".replace("</tool_call>", f"{MARK}</tool_call>")
        message = (await answer(client, say))["choices"][0]["message"]
        assert message["content"] == "<think>as text"
        assert len(message["tool_calls"]) == 1
    sampling = engine.requests[-1].sampling
    assert set(sampling.marks) == {(7, "<tool_call>"), (8, "</tool_call>"), (9, "<think>")}
    assert sampling.reasoning == ReasoningSpan(f"{MARK}<think>", "</think>")
    assert sampling.skip_special_tokens is True


async def test_a_plain_chat_is_left_alone(engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = HERMES
    async with client_for(engine) as client:
        await client.post(URL, json={"messages": [{"role": "user", "content": "a"}], "tools": []})
    sampling = engine.requests[-1].sampling
    assert (sampling.marks, sampling.reasoning) == ((), None)
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


async def test_tools_reach_the_template_in_its_own_words(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    tools = [{**TOOL, "function": {**TOOL["function"], "strict": True}, "x": 1}, NOW]
    await answer(client, "a", *tools)
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    empty = {"type": "object", "properties": {}}
    assert told == [TOOL, {"type": "function", "function": {"name": "now", "parameters": empty}}]


async def test_a_template_without_a_place_for_tools_is_told_in_text(engine: FakeEngine) -> None:
    engine.tokenizer.chat_template = "{{ messages }}"
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
        {"role": "user", "content": f"say:{CALL_NOW}"},
    ]
    async with client_for(engine) as client:
        response = await client.post(URL, json={"messages": messages, "tools": [TOOL, NOW]})
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    turns, options = engine.tokenizer.chats[-1]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user", "user"]
    assert '"name": "get_weather"' in turns[0]["content"]
    assert turns[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }
    assert turns[3]["content"] == "<tool_response>\nnoon\n</tool_response>"
    assert "tools" not in options["template_kwargs"]


async def test_reasoning_effort_none_switches_thinking_off(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await answer(client, "a", reasoning_effort="none")
    assert engine.tokenizer.chats[-1][1]["template_kwargs"]["enable_thinking"] is False


# Choices, and what is refused


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


NAMED = {"type": "function", "function": {"name": "now"}}
REQUIRED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
NO_OBJECT = {"type": "function", "function": {"name": "a", "parameters": []}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", None),
        ({"tool_choice": {"type": "function"}}, "tool_choice.allowed_tools", None),
        ({"tool_choice": "any"}, "tool_choice.type", None),
        ({"tool_choice": 1}, "tool_choice", None),
        ({"tool_choice": "required", "tools": []}, "tool_choice", None),
        ({"tool_choice": NAMED, "tools": None}, "tool_choice", None),
        ({"tools": [TOOL, TOOL]}, "tools", None),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", None),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
        ({"tools": [NO_OBJECT]}, "tools[0].function.parameters", None),
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
async def test_a_demand_is_a_grammar(
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


async def test_a_choice_is_no_grammar_and_one_that_cannot_be_obeyed_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": ALLOWED}):
        await answer(client, "a", **fields)
        assert engine.requests[-1].sampling.grammar is None
    both = body("a", tool_choice="required", response_format={"type": "json_object"})
    assert (await error(client, both))["param"] == "response_format"


async def test_formats_without_a_grammar_write_demanded_calls_as_hermes(engine: FakeEngine) -> None:
    async with client_for(engine, tool_parser="pythonic") as client:
        found = (await answer(client, CALL_NOW, tool_choice="required"))["choices"][0]
        assert found["finish_reason"] == "tool_calls"
        found = (await answer(client, "[now()]"))["choices"][0]
        assert found["finish_reason"] == "tool_calls"


async def test_no_tools_and_auto_are_no_choice(client: httpx.AsyncClient) -> None:
    for fields in (
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none"},
    ):
        response = await client.post(URL, json=body("a") | fields)
        assert response.status_code == 200, response.text


async def test_a_model_whose_format_is_unknown_refuses_tools(engine: FakeEngine) -> None:
    for template, setting in (("{{ tools }}", "auto"), (HERMES, "none"), ("no place", "mistral")):
        engine.tokenizer.chat_template = template
        async with client_for(engine, tool_parser=setting) as client:
            found = await error(client, body("a"))
            assert (found["param"], found["code"]) == ("tools", "unsupported_parameter")


async def test_deep_schemas_are_refused(client: httpx.AsyncClient) -> None:
    schema: dict[str, Any] = {}
    for _ in range(80):
        schema = {"properties": schema}
    found = await error(
        client, body("a", {"type": "function", "function": {"name": "f", "parameters": schema}})
    )
    assert found["param"] == "tools"


# OpenAI's client


async def test_openai_create_and_answer_a_call(openai_client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    messages: list[Any] = [{"role": "user", "content": f"say:{CALL}"}]
    completion = await openai_client.chat.completions.create(
        model="fake-model",
        messages=messages,
        tools=[TOOL, NOW],  # type: ignore[list-item]
    )
    message = completion.choices[0].message
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}
    messages = [{"role": "user", "content": "weather?"}, message]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "say:Sunny."}]
    completion = await openai_client.chat.completions.create(
        model="fake-model",
        messages=messages,
        tools=[TOOL, NOW],  # type: ignore[list-item]
    )
    assert completion.choices[0].message.tool_calls is None
    rendered = engine.tokenizer.chats[-1][0]
    assert rendered[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert rendered[2] == {"role": "tool", "content": "say:Sunny.", "tool_call_id": call.id}


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


async def test_openai_stream_helper_builds_the_calls(openai_client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    say = f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    async with openai_client.chat.completions.stream(
        model="fake-model", messages=[{"role": "user", "content": say}], tools=[tool]
    ) as stream:
        done = [
            event.parsed_arguments
            async for event in stream
            if event.type == "tool_calls.function.arguments.done"
        ]
        completion = await stream.get_final_completion()
    assert done == [GetWeather(city="Paris"), GetWeather(city="Rome")]
    choice = completion.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == done
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_openai_parse_builds_the_arguments(openai_client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    completion = await openai_client.chat.completions.parse(
        model="fake-model", messages=[{"role": "user", "content": f"say:{CALL}"}], tools=[tool]
    )
    assert completion.choices[0].message.tool_calls is not None
    assert completion.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")


async def test_openai_stream_of_reasoning(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "say:<think>Hm.</think>4"}], stream=True
    )
    reasoning = content = ""
    async for chunk in stream:
        delta = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == ("Hm.", "4")
