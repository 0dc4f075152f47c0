"""curl, as README has it: a stream, an answer, an error."""

import json
import shutil
import subprocess

import pytest

from .conftest import MODEL


def curl(*arguments: str) -> str:
    """What curl prints."""
    program = shutil.which("curl")
    assert program, "curl is not installed"
    done = subprocess.run(
        [program, "-sS", "--max-time", "120", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def body() -> dict[str, object]:
    content = "What is the capital of France? Answer in one word."
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}


def test_answer_and_stream(base_url: str, body: dict[str, object]) -> None:
    there = (f"{base_url}/chat/completions", "-H", "Content-Type: application/json", "-d")
    whole = json.loads(curl(*there, json.dumps(body)))["choices"][0]["message"]["content"]
    events = curl("-N", *there, json.dumps({**body, "stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert "Paris" in whole


def test_models_and_errors(base_url: str) -> None:
    assert json.loads(curl(f"{base_url}/models"))["data"][0]["id"] == MODEL
    told = json.loads(curl(f"{base_url}/chat/completions", "-d", "{"))
    assert told["error"]["type"] == "invalid_request_error"
