"""The Responses API over ASGI, with a FakeEngine; the official client meets it in test_live_dialects.py.

Covers server/routes/responses/convert.py, server/routes/responses/create.py and
server/schema/response_items.py.
"""

import threading
from typing import Any

import httpx
import pytest

from server.routes.responses.events import ResponseFrames
from server.schema.responses import LOGPROBS_INCLUDED
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.responses_api import PATH, ask, stream, text_of


async def test_answer_has_the_shape_of_the_api(client: httpx.AsyncClient) -> None:
    answer = await ask(client, model="fake-model", input="tokens=3", metadata={"a": "b"}, temperature=0.5)
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "t0 t1 t2 ", "annotations": [], "logprobs": []}
    ]
    assert answer["usage"] == {
        "input_tokens": 8,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 11,
    }
    assert (answer["metadata"], answer["temperature"], answer["top_p"]) == ({"a": "b"}, 0.5, 1.0)
    assert answer["store"] is False, "nothing is stored, whatever is asked for"


async def test_events_come_in_the_order_of_the_api(client: httpx.AsyncClient) -> None:
    events = await stream(client, input="tokens=3 delay=0.002")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert text_of(events) == "t0 t1 t2 " == events[-4]["text"]
    assert events[0]["response"]["usage"] is None
    whole = events[-1]["response"]
    assert whole["output"] == [events[-2]["item"]]
    assert whole["usage"]["output_tokens"] == 3
    assert len({event.get("item_id") or event["item"]["id"] for event in events[2:-1]}) == 1
    assert len({event["response"]["id"] for event in (events[0], events[1], events[-1])}) == 1


async def test_an_answer_without_text_still_has_its_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_silent = True
    assert (await ask(client, input="a"))["output"][0]["content"][0]["text"] == ""
    kinds = [event["type"].removeprefix("response.") for event in await stream(client, input="a")]
    assert kinds[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize("text", ['"\\\n\t', "日本🎉", "event: x\n\ndata: -1"])
async def test_text_survives(client: httpx.AsyncClient, text: str) -> None:
    events = await stream(client, input=f"say:{text}", max_output_tokens=50)
    assert text_of(events) == text


async def test_an_answer_cut_by_its_limit_is_incomplete(client: httpx.AsyncClient) -> None:
    answer = await ask(client, input="tokens=5", max_output_tokens=2)
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert answer["output"][0]["status"] == "incomplete"
    events = await stream(client, input="tokens=5", max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_the_conversation_reaches_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(
        client,
        instructions="be brief",
        reasoning={"effort": "low", "summary": "auto"},
        input=[
            {"role": "developer", "content": "rules"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
            },
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "id": "m",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "calling", "annotations": []}],
            },
            {"type": "function_call", "id": "f", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "r1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "r2"}],
            },
        ],
    )
    [(turns, options)] = engine.tokenizer.chats
    assert turns == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "calling",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "r1", "tool_call_id": "c1"},
        {"role": "tool", "content": "r2", "tool_call_id": "c2"},
    ]
    assert options["add_generation_prompt"] is True
    assert options["template_kwargs"] == {"reasoning_effort": "low"}


async def test_items_of_tools_that_the_server_lacks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(
        client,
        input=[
            {"type": "ghost_snapshot", "ghost_commit": {}},
            {"role": "user", "content": "fix it"},
            {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
            {"type": "tool_search_call", "call_id": "t", "arguments": {}},
            {"type": "image_generation_call", "id": "i", "action": "generate", "content": 5},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "local_shell_call", "id": "c2", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c2", "output": "a.txt"},
            {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "b", "stderr": ""}]},
            {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "x"}},
            {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
            {"type": "mcp_call", "id": "c5", "name": "ask", "arguments": "{}", "output": "well"},
        ],
    )

    def called(number: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        call = {"id": number, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def returned(number: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "content": text, "tool_call_id": number}

    assert engine.tokenizer.chats[-1][0] == [
        {"role": "user", "content": "fix it"},
        called("c1", "apply_patch", {"input": "*** Begin"}),
        returned("c1", "done"),
        called("c2", "local_shell", {"type": "exec", "command": ["ls"]}),
        returned("c2", "a.txt"),
        called("c3", "shell", {"commands": ["ls"]}),
        returned("c3", '[{"stdout":"b","stderr":""}]'),
        called("c4", "apply_patch", {"type": "delete_file", "path": "x"}),
        returned("c4", ""),
        called("c5", "ask", {}),
        returned("c5", "well"),
    ]


async def test_an_answer_can_be_sent_back(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await ask(client, input="tokens=2")
    conversation = [
        {"role": "user", "content": "tokens=2"},
        *answer["output"],
        {"role": "user", "content": "x"},
    ]
    await ask(client, input=conversation)
    turns, _ = engine.tokenizer.chats[-1]
    assert turns[1] == {"role": "assistant", "content": "t0 t1 "}


async def test_sampling_fields_act(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await ask(client, input="a", temperature=0.5, top_p=0.9, top_k=7, seed=3, stop="x", max_output_tokens=9)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.stop, sampling.max_tokens) == (("x",), 9)


async def test_text_has_its_log_probabilities(client: httpx.AsyncClient) -> None:
    """As chat tells them: in the text of an answer, in each delta, and in whatever says that it is whole."""
    fields = {"input": "say:aé", "include": [LOGPROBS_INCLUDED], "top_logprobs": 2}
    answer = await ask(client, **fields)
    [part] = answer["output"][0]["content"]
    body = {"messages": [{"role": "user", "content": "say:aé"}], "logprobs": True, "top_logprobs": 2}
    chat = (await client.post("/v1/chat/completions", json=body)).json()
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2, 2]
    assert answer["top_logprobs"] == 2
    events = await stream(client, **fields)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    by_type = {event["type"].removeprefix("response."): event for event in events}
    assert by_type["output_text.done"]["logprobs"] == part["logprobs"]
    assert by_type["content_part.added"]["part"]["logprobs"] == []
    assert by_type["content_part.done"]["part"] == part
    assert by_type["output_item.done"]["item"] == {**answer["output"][0], "id": events[2]["item"]["id"]}
    assert by_type["completed"]["response"]["output"][0]["content"] == [part]


@pytest.mark.parametrize(
    "fields", [{"tools": [{"type": "function", "name": "f"}]}, {"reasoning": {"effort": "high"}}]
)
async def test_log_probabilities_are_those_of_text_alone(engine: FakeEngine, fields: dict[str, Any]) -> None:
    """Which tokens are the text's is not known where some of them are reasoning or calls."""
    settings = {"tool_parser": "hermes"} if "tools" in fields else {"reasoning_parser": "think"}
    async with client_for(engine, **settings) as client:
        body = {"input": "a", "include": [LOGPROBS_INCLUDED], **fields}
        response = await client.post(PATH, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("include", "unsupported_parameter")
        assert not engine.requests
        assert (await client.post(PATH, json=body | {"include": []})).status_code == 200


async def test_log_probabilities_are_not_told_unless_asked_for(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"top_logprobs": 0}, {"include": ["reasoning.encrypted_content"]}):
        [part] = (await ask(client, input="say:ab", **fields))["output"][0]["content"]
        assert part["logprobs"] == []
    answer = await ask(client, input="say:ab", include=[LOGPROBS_INCLUDED])
    told = answer["output"][0]["content"][0]["logprobs"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in told] == [("a", []), ("b", [])]


async def test_the_end_of_a_long_text_is_written_off_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells all tokens once more."""
    ends: list[tuple[int, bool]] = []
    ending = ResponseFrames.ending

    def watched(frames: ResponseFrames) -> bytes:
        ends.append((frames.answer.usage().completion_tokens, threading.current_thread() is here))
        return ending(frames)

    here = threading.current_thread()
    monkeypatch.setattr(ResponseFrames, "ending", watched)
    for num_tokens in (5, 100):
        orders = f"tokens={num_tokens} delay=0.0001"
        await stream(client, input=orders, include=[LOGPROBS_INCLUDED])
        await stream(client, input=orders)
    assert ends == [(5, True), (5, True), (100, False), (100, True)]


async def test_instructions_and_a_developer_item_are_one_system_message(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    items = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    for anywhere, turns in (
        (True, [("system", "be brief"), ("system", "be kind"), ("user", "hi")]),
        (False, [("system", "be brief\n\nbe kind"), ("user", "hi")]),
    ):
        engine.tokenizer.takes_system_anywhere = anywhere
        await ask(client, instructions="be brief", input=items)
        assert [(turn["role"], turn["content"]) for turn in engine.tokenizer.chats[-1][0]] == turns


async def test_a_response_is_not_kept(client: httpx.AsyncClient) -> None:
    answer = await ask(client, input="a", store=True)
    assert (await client.get(f"{PATH}/{answer['id']}")).status_code == 404
