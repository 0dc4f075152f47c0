"""OpenAI's own client for Node, in a script of its own."""

import json
import shutil
import subprocess
from pathlib import Path

from .conftest import MODEL

SCRIPT = Path(__file__).parent / "node" / "client.mjs"


def test_node(base_url: str) -> None:
    node = shutil.which("node")
    assert node, "node is not installed"
    done = subprocess.run(
        [node, str(SCRIPT), base_url, MODEL], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "Paris" in found["whole"]
    assert found["streamed"] == found["helper"] == found["whole"]
    assert found["usage"]["completion_tokens"] > 0
    assert json.loads(found["structured"])["city"] in ("Paris", "Rome")
    assert found["response"]
    assert found["dimensions"] > 0
    assert (found["status"], found["param"]) == (400, "temperature")
