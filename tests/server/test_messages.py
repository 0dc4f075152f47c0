"""The Anthropic API over ASGI, with a FakeEngine; the official client meets it in test_live.py.

Covers server/routes/anthropic/convert.py.
"""

from typing import Any

import httpx
import pytest

from server.schema.message_events import CountTokensResponse
from tests.server.fake_engine import FakeEngine
from tests.server.messages_api import PATH, ask, body, stream


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
