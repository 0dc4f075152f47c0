"""The Responses API over ASGI, with a FakeEngine; the official client meets it in test_live_dialects.py.

Covers server/routes/responses/convert.py, server/routes/responses/create.py and
server/schema/response_items.py.
"""

import json
import threading
from typing import Any

import httpx
import pytest
from openai.types.responses import Response as SdkResponse
from openai.types.responses import ResponseStreamEvent as SdkEvent
from pydantic import TypeAdapter

from server.routes.responses.events import ResponseFrames
from server.schema.errors import ErrorResponse
from server.schema.response_events import ResponseEvent
from server.schema.responses import LOGPROBS_INCLUDED, ResponseObject
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, CALL_NOW

PATH = "/v1/responses"
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(SdkEvent)


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    ResponseObject.model_validate(response.json())
    SdkResponse.model_validate(response.json())
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer; checks their framing and their numbers."""
    response = await client.post(PATH, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for number, frame in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        ResponseEvent.model_validate(event)
        SDK_EVENT.validate_python(event)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


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


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
NOW = {"type": "function", "name": "now"}
SAY = f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL_NOW}"


async def test_thoughts_and_calls_are_items_of_their_own(thinker: httpx.AsyncClient) -> None:
    answer = await ask(thinker, input=SAY, tools=[WEATHER, NOW])
    thought, said, weather, now = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (said["type"], said["content"][0]["text"]) == ("message", "I look.")
    assert (weather["type"], weather["name"], weather["arguments"]) == (
        "function_call",
        "get_weather",
        '{"city": "Paris"}',
    )
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert len({item["id"] for item in answer["output"]}) == 4
    assert weather["call_id"] != now["call_id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    assert answer["tools"][1] == NOW | {"description": None, "parameters": None, "strict": False}


async def test_streamed_items_begin_grow_and_end_one_after_the_other(thinker: httpx.AsyncClient) -> None:
    events = await stream(thinker, input=SAY, tools=[WEATHER, NOW])
    output = events[-1]["response"]["output"]
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    names = {
        "reasoning": "reasoning_text",
        "message": "output_text",
        "function_call": "function_call_arguments",
    }
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own == events[events.index(own[0]) : events.index(own[-1]) + 1], "items do not mix"
        name = f"response.{names[item['type']]}"
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        pieces = [event["delta"] for event in own if event["type"] == f"{name}.delta"]
        assert "".join(pieces) == text and len(pieces) > 1
        [done] = [event for event in own if event["type"] == f"{name}.done"]
        assert done["arguments" if item["type"] == "function_call" else "text"] == text
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


@pytest.mark.parametrize("limit", [5, 25, 80])
async def test_only_the_item_in_which_an_answer_is_cut_is_incomplete(
    thinker: httpx.AsyncClient, limit: int
) -> None:
    fields = {"input": SAY, "tools": [WEATHER, NOW], "max_output_tokens": limit}
    answer = await ask(thinker, **fields)
    statuses = [item["status"] for item in answer["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + ["incomplete"]
    events = await stream(thinker, **fields)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == statuses
    assert done == events[-1]["response"]["output"]


async def test_choices_of_tools_act(thinker: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {"input": f"say:{CALL}\n{CALL_NOW}", "tools": [WEATHER, NOW]}
    one = await ask(thinker, **fields, parallel_tool_calls=False)
    assert [item["name"] for item in one["output"]] == ["get_weather"]
    told = engine.tokenizer.chats[-1][1]["template_kwargs"]["tools"]
    assert told[0]["function"]["description"] == "Weather of a city."
    none = await ask(thinker, **fields, tool_choice="none")
    assert ([item["type"] for item in none["output"]], none["tool_choice"]) == (["message"], "none")
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        forced = await ask(thinker, **fields, tool_choice=choice)
        assert (forced["output"][0]["name"], forced["tool_choice"]) == ("get_weather", choice)
        assert engine.requests[-1].sampling.grammar is not None
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    some = await ask(thinker, **fields, tool_choice=allowed)
    assert [item.get("name") for item in some["output"]] == [None, "now"]
    assert some["tool_choice"] == allowed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
async def test_a_forced_call_that_is_cut_before_it_begins_is_no_item(
    thinker: httpx.AsyncClient, choice: Any
) -> None:
    fields = {"input": f"say:{CALL_NOW}", "tools": [NOW], "tool_choice": choice, "max_output_tokens": 4}
    answer = await ask(thinker, **fields)
    assert (answer["output"], answer["status"]) == ([], "incomplete")
    kinds = [event["type"] for event in await stream(thinker, **fields)]
    assert kinds == ["response.created", "response.in_progress", "response.incomplete"]


@pytest.mark.parametrize("choice", [{"type": "web_search"}, {"type": "function", "name": "nope"}])
async def test_a_choice_of_a_tool_that_is_left_out_says_so(client: httpx.AsyncClient, choice: Any) -> None:
    response = await client.post(
        PATH, json={"input": "a", "tools": [{"type": "web_search"}], "tool_choice": choice}
    )
    assert response.status_code == 400
    assert "are left out and cannot be demanded" in response.json()["error"]["message"]


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


CODEX_TOOLS = [
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
    {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "g"}]},
    {"type": "tool_search", "description": "d", "parameters": {"type": "object"}},
]
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}


@pytest.mark.parametrize("streaming", [False, True])
async def test_tools_that_are_no_functions_are_left_out(
    thinker: httpx.AsyncClient, engine: FakeEngine, streaming: bool
) -> None:
    names = [{"type": "web_search"}, {"type": "function", "name": "shell"}]
    for tools, choice, kept in (
        ([*CODEX_TOOLS, SHELL], "auto", ["shell"]),
        ([*CODEX_TOOLS, SHELL], {"type": "allowed_tools", "mode": "auto", "tools": names}, ["shell"]),
        (CODEX_TOOLS, "auto", []),
        (CODEX_TOOLS, {"type": "allowed_tools", "mode": "auto", "tools": CODEX_TOOLS}, []),
    ):
        fields = {"input": "a", "tools": tools, "tool_choice": choice}
        response = (
            (await stream(thinker, **fields))[-1]["response"] if streaming else await ask(thinker, **fields)
        )
        assert [tool["name"] for tool in response["tools"]] == kept
        listed = engine.tokenizer.chats[-1][1]["template_kwargs"].get("tools", ())
        assert [tool["function"]["name"] for tool in listed] == kept


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


async def test_a_reference_to_an_item_is_refused_with_what_to_send(client: httpx.AsyncClient) -> None:
    items = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "hi"}]
    response = await client.post(PATH, json={"input": items})
    assert response.status_code == 400
    assert "each item itself instead of its id" in response.json()["error"]["message"]


NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": "a\0"}, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f\0", "arguments": ""}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "web_search_call"}, {"role": "user"}]}, "input[1].content"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input"),
    ({"input": [{"type": "shell_call", "call_id": "1", "action": "ls"}]}, "input[0].action"),
    ({"input": [{"type": "shell_call_output", "call_id": "1", "output": [NESTED]}]}, "input[0].output"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": "x" * 5000}, "input"),
    ({"input": "x" * 9000}, "input"),
    ({"input": "bad template"}, "input"),
    ({"input": "a", "instructions": 5}, "instructions"),
    ({"input": "a", "instructions": "\0"}, "instructions"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "max_output_tokens": 4096}, "max_output_tokens"),
    ({"input": "a", "max_tokens": 5}, "max_tokens"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ({"input": "a", "temperature": 3}, "temperature"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "tools": [{"type": "x", "name": "f", "parameters": {}}]}, "tools[0].type"),
    ({"input": "a", "tools": [{"type": 5}]}, "tools[0].type"),
    ({"input": "a", "tools": CODEX_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"input": "a", "tools": CODEX_TOOLS, "tool_choice": "required"}, "tool_choice"),
    (
        {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": CODEX_TOOLS}},
        "tool_choice.tools",
    ),
    (
        {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
    ),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "a", "tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
    ({"input": "a", "tools": [{"type": "function", "name": "f"}] * 2}, "tools"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"input": "a", "max_tool_calls": 1}, "max_tool_calls"),
    ({"input": "a", "truncation": "auto"}, "truncation"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "a", "top_logprobs": 3}, "top_logprobs"),
    ({"input": "a", "top_logprobs": 21, "include": [LOGPROBS_INCLUDED]}, "top_logprobs"),
    ({"input": "a", "n": 2}, "n"),
    ({"input": "a", "reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a"),
    ({"input": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{n}-{param}" for n, (_, param) in enumerate(BAD)])
@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_input_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, streaming: bool
) -> None:
    response = await client.post(PATH, json={"stream": streaming} | fields)
    assert response.status_code == 400, response.text[:500]
    error = ErrorResponse.model_validate(response.json()).error
    assert error.param == param, error
    assert not engine.requests


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    await ask(
        client,
        input="a",
        store=True,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        previous_response_id=None,
        background=False,
        truncation="disabled",
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        service_tier="auto",
        user="u",
        stream_options=None,
    )


async def test_a_response_is_not_kept(client: httpx.AsyncClient) -> None:
    answer = await ask(client, input="a", store=True)
    assert (await client.get(f"{PATH}/{answer['id']}")).status_code == 404


async def test_a_fault_in_the_stream_is_its_last_event(client: httpx.AsyncClient) -> None:
    events = await stream(client, input="tokens=5 fail=2 delay=0.002")
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "Computing this request failed.",
    }
    response = await client.post(PATH, json={"input": "fail=1"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


async def test_a_deadline_in_the_stream_is_its_last_event(engine: FakeEngine) -> None:
    async with client_for(engine, request_timeout_seconds=0.5) as client:
        events = await stream(client, input="hang")
    assert events[-1]["type"] == "response.failed"
    assert not engine.live
