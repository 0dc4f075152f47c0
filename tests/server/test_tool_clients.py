"""Tools and reasoning in chat with OpenAI's client."""

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.fake_engine import FakeEngine
from tests.server.tool_chat import CALL, NOW, TOOL

pytestmark = pytest.mark.usefixtures("calls_and_thinks")


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
