"""README's examples, as they stand there, against a live server with the default model."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

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


def test_the_tree_names_every_file_of_the_floors() -> None:
    """One line per file: a new one gets its line, a removed one loses it."""
    tree = README.split("## The tree")[1].split("```")[1]
    listed, folders = set(), []
    for line in tree.strip("\n").splitlines():
        name = line.split()[0]
        folders[(len(line) - len(line.lstrip())) // 2 :] = [name]
        if name.endswith(".py"):
            listed.add("".join(folders))
    floors = ("server", "engine", "models", "kernels")
    there = {
        path.relative_to(ROOT).as_posix()
        for floor in floors
        for path in (ROOT / floor).rglob("*.py")
        if not path.name.startswith("__")
    }
    listed = {path for path in listed if path.startswith(floors)}
    assert listed == there, (
        f"not in README: {sorted(there - listed)}; no such files: {sorted(listed - there)}"
    )


def test_every_file_readme_points_at_is_there() -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert targets
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing, f"README points at {missing}"
