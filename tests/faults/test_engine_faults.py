"""Faults of a running server: what its clients see, what its log says, and how the process ends."""

import json
import signal
import threading
from collections.abc import Callable

import pytest

from tests.faults.conftest import Bystander, ToyServer, body
from tests.faults.serve_toy import FAULTY

Start = Callable[..., ToyServer]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang", "The device is stuck: it has made no progress for 1 s."),
        ("end", "The device thread has ended after a fault."),
        ("lose", "The device has failed: an illegal memory access was encountered"),
    ],
)
def test_what_no_step_survives_ends_the_server(start: Start, fault: str, reason: str) -> None:
    server = start("--watchdog-timeout-seconds", "1", FAULT=fault)
    bystander = Bystander(server)
    response = server.post("/v1/completions", json=body(FAULTY))
    assert (response.status_code, response.json()["error"]["message"]) == (503, reason)
    error, end = bystander.end()
    assert (json.loads(error)["error"]["message"], end) == (reason, "[DONE]")
    assert server.exit_code() == 1
    assert reason in server.log
    if fault == "hang":
        assert "in hang" in server.log, "the log does not show where the thread is"


def test_a_device_that_is_stuck_does_not_hold_a_drain_up(start: Start) -> None:
    server = start("--watchdog-timeout-seconds", "3", FAULT="hang")
    answers: list[int] = []
    client = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", json=body(FAULTY)).status_code)
    )
    client.start()
    server.wait_for("hanging")
    server.send(signal.SIGTERM)
    server.wait_for("finishing what runs")
    assert server.exit_code() == 1
    client.join(20)
    assert answers == [503]


def test_a_step_that_fails_ends_its_requests_alone(start: Start) -> None:
    server = start(FAULT="raise")
    sound = server.post("/v1/completions", json=body(1)).json()["choices"]
    response = server.post("/v1/completions", json=body(FAULTY))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Computing this request failed."
    assert server.post("/v1/completions", json=body(1)).json()["choices"] == sound
    assert server.get("/health").status_code == 200
    assert "broken on purpose" in server.log
    assert server.get("/load").json()["pages_used"] == 0
