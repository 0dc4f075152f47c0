"""LangChain, LlamaIndex, LiteLLM, Anthropic's client and `llm`, each told nothing but where the server is."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import anthropic
import litellm
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from .conftest import MODEL

QUESTION = "What is the capital of France? Answer in one word."


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}."


def langchain(base_url: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key="none", temperature=0, max_retries=0, **fields)


def test_langchain(base_url: str) -> None:
    chat = langchain(base_url, max_tokens=12, stream_usage=True)
    answer = chat.invoke(QUESTION)
    assert "Paris" in answer.content
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert asyncio.run(chat.ainvoke(QUESTION)).content == answer.content
    assert [found.content for found in chat.batch([QUESTION, QUESTION])] == [answer.content] * 2


def test_langchain_structured_output(base_url: str) -> None:
    for method in ("json_schema", "function_calling"):
        chat = langchain(base_url, max_tokens=80).with_structured_output(City, method=method)
        assert isinstance(chat.invoke("Name the capital of France."), City), method


def test_langchain_tools(base_url: str) -> None:
    chat = langchain(base_url, max_tokens=80).bind_tools([get_weather], tool_choice="get_weather")
    answer = chat.invoke("How is the weather in Paris?")
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]
    joined: Any = None
    for chunk in chat.stream("How is the weather in Paris?"):
        joined = chunk if joined is None else joined + chunk
    assert [call["args"] for call in joined.tool_calls] == [call["args"] for call in answer.tool_calls]


def test_langchain_embeddings(base_url: str) -> None:
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=base_url, api_key="none", check_embedding_ctx_length=False
    )
    one, other = embeddings.embed_documents(["a cat", "a dog"])
    assert len(one) == len(other) and one != other


def test_llama_index(base_url: str) -> None:
    model = OpenAILike(
        model=MODEL,
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        context_window=4096,
        max_tokens=12,
        temperature=0,
        max_retries=0,
    )
    question = [ChatMessage(role="user", content=QUESTION)]
    answer = model.chat(question).message.content
    assert answer and "Paris" in answer
    assert "".join(part.delta or "" for part in model.stream_chat(question)) == answer
    plain = OpenAILike(
        model=MODEL, api_base=base_url, api_key="none", is_chat_model=False, max_tokens=4, temperature=0
    )
    assert plain.complete("The capital of France is").text


def test_litellm(base_url: str) -> None:
    fields: Any = {
        "model": f"openai/{MODEL}",
        "api_base": base_url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = litellm.completion(**fields)
    assert "Paris" in answer.choices[0].message.content
    chunks = litellm.completion(**fields, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content


def test_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        fields: Any = {
            "model": MODEL,
            "max_tokens": 12,
            "extra_body": {"temperature": 0},  # the client has no such argument any more
            "messages": [{"role": "user", "content": QUESTION}],
        }
        answer: Any = client.messages.create(**fields)
        assert "Paris" in answer.content[0].text
        with client.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        weather: Any = {
            "name": "get_weather",
            "description": "The weather in a city",
            "input_schema": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        }
        called: Any = client.messages.create(
            **{**fields, "max_tokens": 80},
            tools=[weather],
            tool_choice={"type": "tool", "name": "get_weather"},
        )
        assert called.stop_reason == "tool_use", called
        assert [(block.name, set(block.input)) for block in called.content if block.type == "tool_use"] == [
            ("get_weather", {"city"})
        ]


def test_llm(base_url: str, tmp_path: Path) -> None:
    """The command-line tool, with the server as one of its OpenAI models."""
    entry = {"model_id": "here", "model_name": MODEL, "api_base": base_url}
    tmp_path.joinpath("extra-openai-models.yaml").write_text(json.dumps([entry]))
    tmp_path.joinpath("keys.json").write_text(json.dumps({"openai": "none"}))
    command = [sys.executable, "-m", "llm", "-m", "here", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for more in ([], ["--no-stream"]):
        done = subprocess.run(
            [*command, *more, QUESTION],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0 and "Paris" in done.stdout, done.stdout + done.stderr
