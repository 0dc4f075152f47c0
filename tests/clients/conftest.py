"""A real server with the default model, for clients as they are published.

Run with `make test-clients`, which names the server's command in MONOLOOP. A client that is missing is a
failure: nothing here is skipped.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

MODEL = "SmolLM2-135M-Instruct"
STARTUP_SECONDS = 180


@pytest.fixture(scope="session")
def command() -> str:
    """The monoloop command."""
    found = shutil.which(os.environ.get("MONOLOOP", "monoloop"))
    assert found, "name the monoloop command in MONOLOOP; `make test-clients` does"
    return found


@pytest.fixture(scope="session")
def url(command: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it is ready: computing in float32, so that figures can be compared."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        arguments = ["serve", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096"]
        server = subprocess.Popen([command, *arguments], stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, address, log)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    assert code == 0, f"the server ended with {code}:\n{log.read_text()}"


def wait_until_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        assert server.poll() is None, f"the server did not start:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{log.read_text()}"
        try:
            if httpx.get(f"{address}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    """What OpenAI's clients want to know."""
    return f"{url}/v1"


@pytest.fixture
def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
