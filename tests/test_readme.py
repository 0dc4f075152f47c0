"""README's examples against a live server with the default model; its tree of folders."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
START_SECONDS = 300


def example(language: str, word: str) -> str:
    """The code block in `language` that contains `word`."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if word in block)
    return str(block)


@pytest.fixture(scope="module")
def address(smollm: object) -> Iterator[str]:
    """Where a server with the default model listens."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "server", "serve", "--port", "0", "--kv-tokens", "4096"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.start()
        log = ""
        while not (found := re.search(r"is ready after .*?(http://\S+)", log)):
            line = process.stderr.readline()
            assert line, f"the server did not start:\n{log}"
            log += line
        timer.cancel()
        drainer = threading.Thread(target=process.stderr.read)
        drainer.start()
        yield found[1]
        process.terminate()
        assert process.wait(60) == 0
        drainer.join()


@pytest.mark.slow
def test_curl_streams_an_answer(address: str) -> None:
    command = example("sh", "curl -N").replace(ADDRESS, address)
    output = subprocess.run(["sh", "-ec", command], capture_output=True, timeout=120, check=True).stdout
    *events, done = [event for event in output.decode().split("\n\n") if event and not event.startswith(":")]
    assert done == "data: [DONE]"
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.slow
def test_the_openai_client_streams_the_same(address: str) -> None:
    program = example("python", "from openai").replace(ADDRESS, address)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def answer_to(word: str, address: str) -> Any:
    """Return the JSON that the curl example with `word` prints."""
    command = example("sh", word).replace(ADDRESS, address)
    return orjson.loads(
        subprocess.run(["sh", "-ec", command], capture_output=True, timeout=120, check=True).stdout
    )


@pytest.mark.slow
def test_json_follows_the_schema(address: str) -> None:
    [choice] = answer_to("response_format", address)["choices"]
    assert choice["finish_reason"] == "stop"
    review = orjson.loads(choice["message"]["content"])
    assert review["feeling"] in ("positive", "negative")
    assert 1 <= review["stars"] <= 5


@pytest.mark.slow
def test_a_tool_is_called(address: str) -> None:
    [choice] = answer_to("tool_choice", address)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert list(orjson.loads(call["function"]["arguments"])) == ["city"]


@pytest.mark.slow
def test_every_input_is_embedded(address: str) -> None:
    assert len(answer_to("/v1/embeddings", address)["data"]) == 2


@pytest.mark.slow
def test_the_guide_of_the_api_runs(address: str) -> None:
    """The Python blocks of docs/api.md, as one program."""
    guide = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    program = "".join(blocks).replace(ADDRESS, address)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "context_length_exceeded" in result.stdout


def listed_folders() -> set[str]:
    """Return the paths of README's tree of folders, without the last slash."""
    tree = README.split("## How it is built")[1].split("```")[1]
    paths, folders = set(), []
    for line in tree.strip("\n").splitlines():
        folders[(len(line) - len(line.lstrip())) // 2 :] = [line.split()[0].rstrip("/")]
        paths.add("/".join(folders))
    return paths


def test_the_tree_lists_every_folder_of_the_floors() -> None:
    floors = ("server", "engine", "models", "kernels")
    existing = {path.parent for floor in floors for path in (ROOT / floor).rglob("*.py")}
    folders = {path.relative_to(ROOT).as_posix() for path in existing}
    assert folders <= listed_folders(), f"add to README's tree: {sorted(folders - listed_folders())}"


def test_the_tree_lists_only_folders_that_exist() -> None:
    gone = [folder for folder in listed_folders() if not (ROOT / folder).is_dir()]
    assert not gone, f"remove from README's tree: {sorted(gone)}"


def test_every_architecture_that_loads_is_named() -> None:
    from models.families import registered_names
    from models.gguf.architectures import registered_gguf_names

    section = README.split("### Which models load")[1].split("###")[0]
    unnamed = [name for name in (*registered_names(), *registered_gguf_names()) if f"`{name}`" not in section]
    assert not unnamed, f"README does not say that {unnamed} load"
