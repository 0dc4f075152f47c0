"""The Anthropic API over ASGI, with a FakeEngine; the official client meets it in test_live.py.

Covers server/routes/anthropic/convert.py.
"""

import json
from typing import Any

import httpx
import pytest
from anthropic.types import Message as SdkMessage

from server.schema.anthropic import CountTokensResponse, Message, MessageEvent
from server.schema.errors import AnthropicError
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, CALL_NOW

PATH = "/v1/messages"


def body(content: Any = "tokens=3", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": content}], **fields}


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    Message.model_validate(response.json())
    SdkMessage.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer; checks their framing."""
    response = await client.post(PATH, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        MessageEvent.model_validate(events[-1])
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_answer_has_the_shape_of_the_api(client: httpx.AsyncClient) -> None:
    answer = await ask(client, **body(model="fake-model"))
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": "t0 t1 t2 "}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


async def test_events_come_in_the_order_of_the_api(client: httpx.AsyncClient) -> None:
    events = await stream(client, **body("tokens=3 delay=0.002"))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == 20
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == "t0 t1 t2 "
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_an_answer_without_text_has_no_block(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.is_silent = True
    assert (await ask(client, **body()))["content"] == []
    events = await stream(client, **body())
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]


@pytest.mark.parametrize("text", ['"\\\n\t', "日本🎉", "event: x\n\ndata: y"])
async def test_text_survives(client: httpx.AsyncClient, text: str) -> None:
    events = await stream(client, **body(f"say:{text}"))
    assert "".join(event["delta"].get("text", "") for event in events if event.get("delta")) == text


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["t1", "x"]}, "stop_sequence", "t1"),
    ],
)
async def test_reasons(
    client: httpx.AsyncClient, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = await ask(client, **body("tokens=3", **fields))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    events = await stream(client, **body("tokens=3", **fields))
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_a_limit_beyond_the_context_is_cut(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    content = "tokens=50 " + "x" * 4066
    answer = await ask(client, **body(content, max_tokens=64000))
    assert engine.requests[0].sampling.max_tokens == 20
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["output_tokens"] == 20


async def test_cached_tokens_are_told_apart(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 5
    usage = (await ask(client, **body()))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 5)


async def test_the_conversation_reaches_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "calling"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "r1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "r2"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    }
    await ask(client, **fields)
    [(turns, options)] = engine.tokenizer.chats
    assert turns == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "calling",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "r1", "tool_call_id": "t1"},
        {"role": "tool", "content": "r2", "tool_call_id": "t2"},
        {"role": "user", "content": "go on"},
    ]
    assert options["template_kwargs"] == {"enable_thinking": False, "reasoning_effort": "low"}
    assert options["add_generation_prompt"] is True


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "r1"}
LATER_SYSTEM = [
    {"role": "user", "content": "one"},
    {"role": "system", "content": "be brief"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
    {"role": "user", "content": [RESULT]},
    {
        "role": "system",
        "content": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    },
]


@pytest.mark.parametrize(
    ("anywhere", "expected"),
    [
        (
            True,
            [
                ("system", "help"),
                ("user", "one"),
                ("system", "be brief"),
                ("assistant", ""),
                ("tool", "r1"),
                ("system", "be kind"),
            ],
        ),
        (
            False,
            [
                ("system", "help"),
                ("user", "one\n\nbe brief"),
                ("assistant", ""),
                ("tool", "r1\n\nbe kind"),
            ],
        ),
    ],
)
async def test_later_system_messages_are_rendered_in_place_and_counted(
    client: httpx.AsyncClient, engine: FakeEngine, anywhere: bool, expected: list[tuple[str, str]]
) -> None:
    engine.tokenizer.takes_system_anywhere = anywhere
    fields = {"system": "help", "messages": LATER_SYSTEM}
    answer = await ask(client, max_tokens=5, **fields)
    counted = await client.post(f"{PATH}/count_tokens", json=fields)
    for turns, options in engine.tokenizer.chats:
        assert [(turn["role"], turn["content"]) for turn in turns] == expected
        assert options["add_generation_prompt"] is True
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}


@pytest.mark.parametrize("streaming", [False, True])
async def test_no_output_tokens_compute_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, streaming: bool
) -> None:
    fields = body("x" * 4096, max_tokens=0)  # as long as the context
    if streaming:
        events = await stream(client, **fields)
        assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
        stop_reason, usage = events[1]["delta"]["stop_reason"], events[1]["usage"]
    else:
        answer = await ask(client, **fields)
        assert answer["content"] == []
        stop_reason, usage = answer["stop_reason"], answer["usage"]
    assert (stop_reason, usage["input_tokens"], usage["output_tokens"]) == ("max_tokens", 4096, 0)
    assert engine.requests[0].sampling.max_tokens == 0


async def test_a_last_turn_of_the_assistant_is_continued(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b ("}]
    await ask(client, max_tokens=5, messages=turns)
    [(_, options)] = engine.tokenizer.chats
    assert (options["continue_final_message"], options["add_generation_prompt"]) == (True, False)


async def test_what_is_text_is_read_and_what_other_servers_did_is_left_out(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "citations": []}]
    search = {"type": "search_result", "title": "Hits", "source": "https://a.example", "content": texts}
    plain = {"type": "text", "media_type": "text/plain", "data": "the text"}
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "document", "title": "A", "context": "by B", "source": plain},
                {"type": "document", "source": {"type": "content", "content": texts}},
                {"type": "document", "title": None, "source": {"type": "content", "content": "c"}},
                search,
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error"}},
                {"type": "text", "text": "found"},
                {"type": "tool_use", "id": "t", "name": "find", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "tool_reference", "tool_name": "f"}, search],
                }
            ],
        },
    ]
    await ask(client, max_tokens=1, messages=messages)
    turns, _ = engine.tokenizer.chats[-1]
    found = "Hits\nhttps://a.example\none\ntwo"
    assert [turn["content"] for turn in turns] == [
        f"A\nby B\nthe text\none\ntwo\nc\n{found}",
        "found",
        found,
    ]


async def test_sampling_fields_act(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, **body(temperature=0.5, top_p=0.9, top_k=7, seed=3, min_p=0.1, stop_sequences=["x"]))
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.min_p, sampling.stop, sampling.max_tokens) == (0.1, ("x",), 100)


async def test_count_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"system": "be brief", "messages": [{"role": "user", "content": "hi"}], "model": "fake-model"}
    response = await client.post(f"{PATH}/count_tokens", json=fields)
    CountTokensResponse.model_validate(response.json())
    assert response.json() == {"input_tokens": 11}
    answer = await ask(client, max_tokens=1, **fields)
    assert answer["usage"]["input_tokens"] == 11
    assert len(engine.requests) == 1


WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "cache_control": {"type": "ephemeral"},
}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BASH = {"type": "bash_20250124", "name": "bash"}
SAY = f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL_NOW}"


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in found.items() if name != "id"} for found in blocks]


async def test_thoughts_and_calls_are_blocks_of_their_own(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, **body(SAY, max_tokens=500, tools=[WEATHER, NOW]))
    assert without_ids(answer["content"]) == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    assert answer["content"][2]["id"] != answer["content"][3]["id"]
    assert answer["stop_reason"] == "tool_use"


async def test_streamed_blocks_begin_grow_and_stop_one_after_the_other(thinker: httpx.AsyncClient) -> None:
    fields = body(SAY, max_tokens=500, tools=[WEATHER, NOW])
    events = [event for event in await stream(thinker, **fields) if event["type"] != "ping"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(blocks) - 1
            is_open = False
        else:
            assert is_open and event["index"] == len(blocks) - 1
            piece = event["delta"]
            match piece["type"]:
                case "text_delta":
                    blocks[-1]["text"] += piece["text"]
                case "thinking_delta":
                    blocks[-1]["thinking"] += piece["thinking"]
                case "input_json_delta":
                    blocks[-1]["json"] += piece["partial_json"]
    assert not is_open
    for found in blocks:
        if said := found.pop("json"):
            found["input"] = json.loads(said)
    assert without_ids(blocks) == without_ids((await ask(thinker, **fields))["content"])


async def test_a_call_that_is_cut_has_no_input(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, **body(f"say:{CALL}", max_tokens=60, tools=[WEATHER]))
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


async def test_choices_of_tools_act(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = body(f"say:{CALL}\n{CALL_NOW}", max_tokens=500, tools=[WEATHER, NOW])
    one = await ask(thinker, **fields, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in one["content"]] == ["get_weather"]
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert told[0]["function"] == {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": WEATHER["input_schema"],
    }
    for choice, names in (
        ({"type": "any"}, ["get_weather", "now"]),
        ({"type": "tool", "name": "get_weather"}, ["get_weather"]),
    ):
        forced = await ask(thinker, **fields, tool_choice=choice)
        assert ([block["name"] for block in forced["content"]], forced["stop_reason"]) == (names, "tool_use")
        assert engine.requests[-1].sampling.grammar is not None
    none = await ask(thinker, **fields, tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["text"]
    assert "tools" not in engine.tokenizer.chats[-1][1]["template_kwargs"]


@pytest.mark.parametrize(("kind", "is_on"), [("enabled", True), ("adaptive", True), ("disabled", False)])
async def test_thinking_is_told_to_the_template(
    thinker: httpx.AsyncClient, engine: FakeEngine, kind: str, is_on: bool
) -> None:
    await ask(thinker, **body(thinking={"type": kind, "budget_tokens": 1024}))
    assert engine.tokenizer.chats[-1][1]["template_kwargs"] == {"enable_thinking": is_on}


async def test_tools_of_the_api_itself_are_left_out(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = body(f"say:{CALL_NOW}", max_tokens=500, tools=[SEARCH, BASH, NOW], tool_choice={"type": "any"})
    assert [found["name"] for found in (await ask(thinker, **fields))["content"]] == ["now"]
    listed = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert [tool["function"]["name"] for tool in listed] == ["now"]
    await ask(thinker, **body("say:a", tools=[SEARCH], tool_choice={"type": "auto"}))


async def test_tools_count_as_part_of_the_prompt(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "auto"},
    }
    assert (await thinker.post(f"{PATH}/count_tokens", json=fields)).status_code == 200
    assert engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"][0]["function"]["name"] == "get_weather"


def block(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": kind, **fields}]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": "a"}]}, "max_tokens"),
    (body(max_tokens=-1), "max_tokens"),
    (body(max_tokens="5"), "max_tokens"),
    ({"max_tokens": 5}, "messages"),
    (body(messages=[]), "messages"),
    (body(messages=[{"role": "tool", "content": "a"}]), "messages[0].role"),
    (
        body(messages=[{"role": "system", "content": block("tool_result", tool_use_id="1")}]),
        "no place in a message of the system",
    ),
    (body(messages=[{"role": "user"}]), "messages[0].content"),
    (body(None), "messages[0].content"),
    (body(5), "messages[0].content"),
    (body("a\0"), "messages[0].content[0].text"),
    (body(block("text")), "messages[0].content[0].text"),
    (body(block("image", source={})), "'image' are not supported"),
    (body(block("document", source={})), "'document' are not supported"),
    (body(block("hologram")), "messages[0].content[0].type"),
    (body(block("tool_use", id="1", name="f", input={})), "no place in a message of the user"),
    (body(block("tool_result")), "tool_use_id"),
    (body(block("tool_result", tool_use_id="1", content=block("image"))), "'image' are not supported"),
    (body(block("tool_result", tool_use_id="1", content="\0")), "content[0].content[0].text"),
    (
        body(block("tool_result", tool_use_id="1", content=block("tool_result", tool_use_id="2"))),
        "must be text",
    ),
    (
        body(
            messages=[
                {"role": "assistant", "content": block("tool_use", id="1", name="f", input={"a": "\0"})}
            ]
        ),
        "messages[0].content[0].input",
    ),
    (
        body(messages=[{"role": "assistant", "content": block("tool_result", tool_use_id="1")}]),
        "no place in a message of the assistant",
    ),
    (body(system=5), "system"),
    (body(system=block("image")), "system[0].type"),
    (body(system="a\0"), "system[0].text"),
    (body(temperature=3), "temperature"),
    (body(top_k=-2), "top_k"),
    (body(stop_sequences=[""]), "stop_sequences"),
    (body(stop_sequences=["a\0"]), "stop_sequences"),
    (body(stop=["a"]), "stop is not supported: use stop_sequences"),
    (body(n=2), "n is not supported"),
    (body(chat_template_kwargs={"a": 1}), "it is a field of chat"),
    (body(add_generation_prompt=False), "add_generation_prompt is not supported"),
    (body(stream=1), "stream"),
    (body(thinking={"type": "enabled", "budget_tokens": 0}), "thinking.budget_tokens"),
    (body(thinking={"type": "x"}), "thinking"),
    (body(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema"),
    (body(tools=[{"name": "f"}]), "tools[0].input_schema"),
    (body(tools=[{"name": "f g", "input_schema": {}}]), "tools[0].name"),
    (body(tools=[{"name": "f", "input_schema": {}}] * 2), "names of tools must differ"),
    (body(tools=[{"type": "x", "name": "f", "input_schema": {}}]), "tools[0].type"),
    (body(tools=[SEARCH], tool_choice={"type": "any"}), "tool_choice needs tools"),
    (body(tools=[SEARCH], tool_choice={"type": "tool", "name": "nope"}), "left out and cannot be demanded"),
    (body(tools=[SEARCH, NOW], tool_choice={"type": "tool", "name": "web_search"}), "'web_search'"),
    (body(tool_choice={"type": "any"}), "tool_choice needs tools"),
    (body(tool_choice={"type": "tool"}, tools=[{"name": "f", "input_schema": {}}]), "tool_choice.name"),
    (body(tool_choice={"type": "tool", "name": "g"}, tools=[{"name": "f", "input_schema": {}}]), "'g'"),
    (body(mcp_servers=[{}]), "mcp_servers is not supported"),
    (body(container="x"), "container is not supported"),
    (body(response_format={"type": "json_object"}), "response_format is not supported"),
    (body("x" * 5000), "prompt is too long: This model's maximum context length is 4096 tokens"),
    (body("x" * 9000), "prompt is too long"),
    (body("bad template"), "chat template refuses"),
    (body(logit_bias={"99999999": 1}), "logit_bias"),
    (
        body(messages=[{"role": "user", "content": block("tool_result", tool_use_id="1") * 4000}] * 2),
        "messages",
    ),
]


@pytest.mark.parametrize(
    ("fields", "words"), BAD, ids=[f"{n}-{words[:20]}" for n, (_, words) in enumerate(BAD)]
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_input_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], words: str, streaming: bool
) -> None:
    response = await client.post(PATH, json={"stream": streaming} | fields)
    assert response.status_code == 400, response.text[:500]
    error = AnthropicError.model_validate(response.json()).error
    assert error.type == "invalid_request_error"
    assert words in error.message
    assert len(response.content) < 2000
    assert not engine.requests


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        **body(
            tools=[],
            tool_choice={"type": "auto"},
            metadata={"user_id": "x"},
            service_tier="auto",
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            n=1,
            stream_options=None,
            top_k=0,
        ),
    )


async def test_errors_have_the_envelope_wherever_they_come_from(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",), max_body_bytes=2000) as client:
        for path in (PATH, f"{PATH}/count_tokens"):
            key = {"x-api-key": "k"}
            for status, kind, response in (
                (401, "authentication_error", await client.post(path, json=body())),
                (401, "authentication_error", await client.post(path, headers={"x-api-key": "wrong"})),
                (413, "request_too_large", await client.post(path, content=b" " * 3000, headers=key)),
                (405, "invalid_request_error", await client.get(path, headers=key)),
                (404, "not_found_error", await client.post(path, json=body(model="x"), headers=key)),
                (400, "invalid_request_error", await client.post(path, content=b"{", headers=key)),
            ):
                assert response.status_code == status, response.text
                assert AnthropicError.model_validate(response.json()).error.type == kind
        assert (await client.post(PATH, json=body(), headers={"x-api-key": "k"})).status_code == 200


async def test_states_of_the_server_have_their_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def kind() -> tuple[int, str]:
        response = await client.post(PATH, json=body("fail=1"))
        return response.status_code, AnthropicError.model_validate(response.json()).error.type

    assert await kind() == (500, "api_error")
    engine.is_full = True
    assert await kind() == (429, "rate_limit_error")
    engine.is_draining = True
    assert await kind() == (503, "overloaded_error")


async def test_a_fault_in_the_stream_is_its_last_event(client: httpx.AsyncClient) -> None:
    events = await stream(client, **body("tokens=5 fail=2 delay=0.002"))
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "Computing this request failed."},
    }
    assert "message_stop" not in [event["type"] for event in events]


async def test_a_deadline_in_the_stream_is_an_error_event(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.5) as client:
        events = await stream(client, **body("hang"))
        assert events[-1]["error"]["type"] == "timeout_error"
    assert not engine.live


async def test_a_quiet_stream_sends_pings(engine: FakeEngine) -> None:
    async with client_for(engine, ping_seconds=0.02) as client:
        events = await stream(client, **body("tokens=2 delay=0.3"))
    assert [event["type"] for event in events].count("ping") >= 3
