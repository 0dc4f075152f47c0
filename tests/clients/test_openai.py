"""OpenAI's own Python client: chat, streams, parsed answers, tools, responses, embeddings."""

import base64
import struct
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from .conftest import MODEL

WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Capital(BaseModel):
    country: Literal["France", "Spain"]
    is_in_europe: bool


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


def test_chat(client: openai.OpenAI, messages: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.completion_tokens <= 12


def test_a_stream_says_what_the_answer_says(client: openai.OpenAI, messages: Any) -> None:
    fields: Any = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None and not chunks[-1].choices
    with client.chat.completions.stream(**fields, n=2) as stream:
        final = stream.until_done().get_final_completion()
    assert [choice.message.content for choice in final.choices] == [whole, whole]


def test_parsed_answers(client: openai.OpenAI, messages: Any) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Capital, max_tokens=64
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Capital), answer
    with client.chat.completions.stream(
        model=MODEL, messages=messages, response_format=Capital, max_tokens=64
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Capital)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
        "tools": [WEATHER_TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,  # so small a model would call for ever
        "max_tokens": 80,
        "temperature": 0,
    }
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.tool_calls, message
    call: Any = message.tool_calls[0]
    assert call.function.name == "get_weather"
    with client.chat.completions.stream(**fields) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert [call.function.arguments for call in streamed] == [
        call.function.arguments for call in message.tool_calls if call.type == "function"
    ]
    follow_up = client.chat.completions.create(
        model=MODEL,
        messages=[
            *fields["messages"],
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
        ],
        max_tokens=8,
    )
    assert follow_up.choices[0].finish_reason in ("stop", "length")


def test_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 128, "temperature": 0}
    answer = client.responses.create(**fields)
    assert answer.output_text
    with client.responses.stream(**fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == answer.output_text
    parsed = client.responses.parse(model=MODEL, input="France.", text_format=Capital, max_output_tokens=64)
    assert isinstance(parsed.output_parsed, Capital)


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["a cat", "a kitten", "stock market"]
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64 and unpacks it
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    raw = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="base64").data[0].embedding
    if isinstance(raw, str):
        count = len(plain.data[0].embedding)
        assert len(struct.unpack(f"<{count}f", base64.b64decode(raw))) == count


def test_log_probabilities(client: openai.OpenAI, messages: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content
    text = b"".join(bytes(entry.bytes or ()) for entry in told.content).decode()
    assert text == answer.choices[0].message.content
    for entry in told.content:
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob), "greedy is the best"


def test_errors(client: openai.OpenAI, messages: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=messages)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages, temperature=9)
    assert refused.value.param == "temperature"
