"""Faults around the process: signals, its log, and the disk."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from tests.faults.conftest import Bystander, ToyServer, body
from tests.faults.serve_toy import FAULTY
from tests.server.conftest import ROOT

Start = Callable[..., ToyServer]
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_was_ended_under_load_starts_again_on_its_port(
    start: Start, number: signal.Signals
) -> None:
    first = start("--drain-timeout-seconds", "0.1")
    expected = first.post(COMPLETIONS, json=body(1)).json()["choices"]
    bystanders = [Bystander(first) for _ in range(4)]
    first.send(number)
    code = first.exit_code()
    for bystander in bystanders:
        bystander.join(20)
        assert not bystander.is_alive(), "a client was left waiting"
        assert (bystander.events[-1] == "[DONE]") is (number is signal.SIGTERM)
    assert code == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    second = start("--port", str(first.port))
    assert second.port == first.port
    assert second.post(COMPLETIONS, json=body(1)).json()["choices"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["closed", "stuck"])
def test_a_log_that_is_not_read_holds_nothing_up(fault: str) -> None:
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.serve_toy", "serve", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FAULT": "raise"},
        stderr=write_end,
    )
    try:
        with (
            os.fdopen(read_end, buffering=1, errors="replace") as log,
            httpx.Client(trust_env=False) as client,
        ):
            url = next(
                found[1] for line in log if (found := re.search(r"is ready after .*(http://\S+)", line))
            )
            if fault == "closed":
                log.close()
            else:
                os.set_blocking(write_end, False)
                with suppress(BlockingIOError):
                    while True:
                        os.write(write_end, b"x\n" * 2048)
                os.set_blocking(write_end, True)
            for _ in range(20):
                assert client.post(f"{url}{COMPLETIONS}", json=body(1)).status_code == 200
            assert client.post(f"{url}{COMPLETIONS}", json=body(FAULTY)).status_code == 500
            assert client.get(f"{url}/health").status_code == 200
            os.close(write_end)
            if fault == "stuck":
                os.set_blocking(read_end, False)
                with suppress(BlockingIOError):
                    while os.read(read_end, 1 << 16):
                        pass
                os.set_blocking(read_end, True)
            server.send_signal(signal.SIGTERM)
            if fault == "stuck":
                assert "finishing what runs" in log.read(), "the log did not go on when it was read again"
            assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()
