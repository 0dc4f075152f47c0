"""Reasoning in chat, beside content and calls."""

import json

import httpx
import pytest

from engine.request import ReasoningSpan
from tests.server.conftest import client_for
from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, URL, answer, body, chunks, error

pytestmark = pytest.mark.usefixtures("calls_and_thinks")


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


async def test_reasoning_effort_none_switches_thinking_off(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await answer(client, "a", reasoning_effort="none")
    assert engine.tokenizer.chats[-1][1]["template_kwargs"]["enable_thinking"] is False


async def test_reasoning_that_cannot_be_told_apart_by_token_is_not_told_by_one(engine: FakeEngine) -> None:
    engine.tokenizer.response_template = {"fields": {"thinking": {}}}
    async with client_for(engine, reasoning_parser="response_template") as client:
        found = await error(client, body("a", logprobs=True, include_reasoning=False))
    assert (found["param"], found["code"]) == ("logprobs", "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
async def test_hidden_reasoning_is_not_told_token_by_token(client: httpx.AsyncClient, stream: bool) -> None:
    for shown, expected in ((False, "4 of 5"), (True, "<think>Hm.</think>4 of 5")):
        fields = body("<think>Hm.</think>4 of 5", logprobs=True, include_reasoning=shown, stream=stream)
        response = await client.post(URL, json=fields)
        lines = (
            [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            if stream
            else [response.text]
        )
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        told = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
        assert "".join(token["token"] for token in told) == expected


@pytest.mark.parametrize(
    ("template", "tail", "is_open"),
    [
        ("<think>", "<think>\n", True),
        ("<think>", "<think>", True),
        ("<think>", "<think>\n\n</think>\n\n", False),
        ("<think>", "</think>", False),
        ("<think>", "\n", False),
        ("<seed:think>", "<seed:think>", True),
        ("<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>", False),
        ("<think></think> and <response></response>", "<think>\n", True),
    ],
)
async def test_the_end_of_the_prompt_says_if_reasoning_has_begun(
    engine: FakeEngine, template: str, tail: str, is_open: bool
) -> None:
    """Templates begin the reasoning, or an empty one where thinking is switched off."""
    engine.tokenizer.chat_template = "{{ messages }}{{ tools }}" + template
    messages = [{"role": "user", "content": "tokens=1"}, {"role": "system", "content": tail}]
    async with client_for(engine) as client:
        message = (await client.post(URL, json={"messages": messages})).json()["choices"][0]["message"]
    span = engine.requests[-1].sampling.reasoning
    assert span is not None and span.is_open is is_open
    assert ("reasoning_content" in message) is is_open, "reasoning that never ends is no content"
    assert bool(message["content"]) is not is_open
