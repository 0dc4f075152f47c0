"""The program of docs/offline.md: it runs, and uses public names of the engine alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import EngineDead, InvalidRequest
from tests.engine.toy_engine import request, toy_engine
from tests.tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[2]
[PROGRAM] = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/offline.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)
MODEL = "SmolLM2-135M-Instruct"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.slow
def test_the_program_runs(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    assert f'"{MODEL}"' in PROGRAM
    program = PROGRAM.replace(f'"{MODEL}"', f'"{folder}", device="cpu", kv_tokens=256')
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the model wrote nothing"


def test_it_has_ten_lines_and_uses_public_names() -> None:
    assert len([line for line in PROGRAM.splitlines() if line]) == 10
    [imported] = [node for node in ast.walk(ast.parse(PROGRAM)) if isinstance(node, ast.ImportFrom)]
    assert imported.module == "engine"
    assert {alias.name for alias in imported.names} <= set(engine.__all__)


@pytest.mark.parametrize(
    ("param", "values"),
    {
        "max_tokens": [-1, 1.5, None, "2"],
        "min_tokens": [-1, 0.5],
        "temperature": [-1, float("nan"), float("inf"), "a", None],
        "top_p": [-0.1, 5, float("nan")],
        "top_k": [-1, 1.5],
        "min_p": [-0.1, 2],
        "presence_penalty": [float("nan")],
        "frequency_penalty": [float("-inf")],
        "repetition_penalty": [0, -1, float("inf")],
        "seed": [2**63, -(2**63) - 1, 1.5, "x"],
        "logprobs": [-1, 1.0],
        "logit_bias": [((1, float("nan")),)],
    }.items(),
)
async def test_sampling_that_makes_no_sense_is_refused(param: str, values: list[Any]) -> None:
    async with toy_engine() as running:
        for value in values:
            with pytest.raises(InvalidRequest, match=f"'{param}' ") as error:
                running.submit(request([1], **{param: value}))
            assert error.value.param == param


async def test_a_reader_that_leaves_ends_its_request() -> None:
    async with toy_engine() as running:
        async with running.submit(request([1], 200, ignore_eos=True)) as stream:
            async for _ in stream:
                break
        await running.drain(10)
        assert stream.num_output_tokens < 200


async def test_an_engine_that_was_stopped_says_so() -> None:
    async with toy_engine() as running:
        await running.stop()
        with pytest.raises(EngineDead, match="The engine has been stopped"):
            running.submit(request([1]))
