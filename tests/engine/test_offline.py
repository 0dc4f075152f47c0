"""The program of docs/offline.md: it runs, and uses public names of the engine alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
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
