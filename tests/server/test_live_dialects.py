"""Official clients of the other dialects against a live server on loopback, as they are published."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.server.conftest import LiveServer
from tests.server.tool_chat import CALL


def user(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


@pytest.fixture
def claude(live: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic_message(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="fake-model", max_tokens=50, system="be brief", messages=user("tokens=3")
    )
    [block] = answer.content
    assert block.type == "text" and block.text == "t0 t1 t2 "
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (17, 3)
    assert answer._request_id


def test_anthropic_raw_stream(claude: anthropic.Anthropic) -> None:
    events = list(
        claude.messages.create(
            model="fake-model", max_tokens=50, messages=user("tokens=3 delay=0.01"), stream=True
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(piece.text for piece in pieces if piece.type == "text_delta") == "t0 t1 t2 "


def test_anthropic_stream_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="fake-model", max_tokens=3, messages=user("tokens=9 delay=0.005")
    ) as stream:
        assert "".join(stream.text_stream) == "t0 t1 t2 "
        answer = stream.get_final_message()
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].type == "text" and answer.content[0].text == "t0 t1 t2 "
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (20, 3)


def test_anthropic_stop_sequence_and_prefill(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="fake-model",
        max_tokens=50,
        messages=[*user("tokens=5"), {"role": "assistant", "content": "well ("}],
        stop_sequences=["t2"],
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "t2")


def test_anthropic_count_tokens(claude: anthropic.Anthropic) -> None:
    count = claude.messages.count_tokens(model="fake-model", system="be brief", messages=user("hi"))
    assert count.input_tokens == 11


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="fake-model", max_tokens=5, messages=user("x" * 5000))
    with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
        claude.messages.create(model="other", max_tokens=5, messages=user("hi"))
    with pytest.raises(anthropic.InternalServerError):
        claude.messages.create(model="fake-model", max_tokens=5, messages=user("fail=1"))
    with (
        pytest.raises(anthropic.APIStatusError, match="Computing this request failed"),
        claude.messages.stream(
            model="fake-model", max_tokens=9, messages=user("tokens=5 fail=2 delay=0.005")
        ) as stream,
    ):
        stream.until_done()


async def test_anthropic_async_client_leaves_in_the_middle(live: LiveServer) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=live.url, auth_token="none", max_retries=0) as client,
        client.messages.stream(
            model="fake-model", max_tokens=4000, messages=user("tokens=4000 delay=0.01")
        ) as stream,
    ):
        async for _ in stream.text_stream:
            break
    live.wait_for(r"POST /v1/messages 200 .* msg_\w+ fake-model 22\+\d{1,2} tokens")


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def thinking_server() -> Iterator[LiveServer]:
    """A model that thinks first and calls tools in Hermes' format."""
    server = LiveServer(FAKE_CHAT_TEMPLATE="{{ messages }}{{ tools }}<tool_call><think>").ready()
    yield server
    server.close()
    assert "Traceback" not in server.log, server.log


def test_anthropic_tools_and_thinking(thinking_server: LiveServer) -> None:
    turns = user(f"say:<think>Hm.</think>I look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}")
    fields: dict[str, Any] = {
        "model": "fake-model",
        "max_tokens": 500,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with anthropic.Anthropic(base_url=thinking_server.url, api_key="none", max_retries=0) as claude:
        with claude.messages.stream(messages=turns, **fields) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_message()
        assert {"thinking", "text", "input_json"} < kinds
        answer = claude.messages.create(messages=turns, **fields)
        for found in (streamed, answer):
            assert found.stop_reason == "tool_use"
            assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
            calls = [block for block in found.content if block.type == "tool_use"]
            assert [call.input for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "say:Sunny."} for call in calls]
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        last = claude.messages.create(messages=turns, **fields)
    assert last.usage.input_tokens > answer.usage.input_tokens, "thoughts, calls and results can be sent back"


@pytest.fixture
def gpt(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_response(gpt: openai.OpenAI) -> None:
    answer = gpt.responses.create(model="fake-model", instructions="be brief", input="tokens=3")
    assert answer.output_text == "t0 t1 t2 "
    assert (answer.status, answer.error) == ("completed", None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (17, 3)
    again = gpt.responses.create(
        model="fake-model", input=[*user("tokens=1"), *answer.output, *user("tokens=2")]
    )
    assert again.output_text == "t0 "


def test_openai_response_stream(gpt: openai.OpenAI) -> None:
    events = list(gpt.responses.create(model="fake-model", input="tokens=3 delay=0.01", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "t0 t1 t2 "
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text


def test_openai_response_stream_helper(gpt: openai.OpenAI) -> None:
    with gpt.responses.stream(model="fake-model", input="tokens=4 delay=0.005") as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert snapshots[-1] == answer.output_text == "t0 t1 t2 t3 "
    assert answer.usage is not None and answer.usage.output_tokens == 4


def test_openai_response_errors(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.responses.create(model="fake-model", input="hi", previous_response_id="resp_1")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as too_long:
        gpt.responses.create(model="fake-model", input="x" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    last = list(gpt.responses.create(model="fake-model", input="tokens=5 fail=2 delay=0.01", stream=True))[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "Computing this request failed."


def test_openai_response_tools_and_reasoning(thinking_server: LiveServer) -> None:
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
    turns: list[Any] = user(f"say:<think>Hm.</think>I look.\n{CALL}")
    with openai.OpenAI(base_url=f"{thinking_server.url}/v1", api_key="none", max_retries=0) as gpt:
        with gpt.responses.stream(model="fake-model", input=turns, tools=tools) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.get_final_response()
        assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} < kinds
        answer = gpt.responses.create(model="fake-model", input=turns, tools=tools)
        for found in (streamed, answer):
            assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
            assert found.output_text == "I look."
        call = answer.output[-1]
        assert call.type == "function_call" and call.arguments == '{"city": "Paris"}'
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        last = gpt.responses.create(model="fake-model", input=[*turns, *answer.output, result], tools=tools)
    assert last.usage is not None and answer.usage is not None
    assert last.usage.input_tokens > answer.usage.input_tokens


def test_huggingface_hub_generates(live: LiveServer) -> None:
    with InferenceClient(live.url, token="none") as hub:
        assert hub.text_generation("tokens=3", max_new_tokens=20) == "t0 t1 t2 "
        assert hub.text_generation("tokens=5", stop=["t1"], temperature=0.5, seed=3) == "t0 t1"
        pieces = list(hub.text_generation("tokens=4 delay=0.01", stream=True))
        assert "".join(pieces) == "t0 t1 t2 t3 "
        with pytest.raises(ValidationError, match="maximum context length"):
            hub.text_generation("x" * 5000)
