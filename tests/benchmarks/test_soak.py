"""Soaks of the toy model and of the default model, and what the clients of a soak notice."""

import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.clients import Behaviour, Prepared, Shares, mixed_requests, read_answer, token_requests

STREAM = Prepared("one", "/v1/completions", {"stream": True})
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def response(*events: bytes, is_whole: bool = True) -> bytes:
    """Return a streamed response with these events, each in a chunk of its own."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return HEAD + chunks + (b"0\r\n\r\n" if is_whole else b"")


def soak(*flags: str, seconds: float) -> None:
    """Run a soak that must find nothing."""
    # A test depends on no timing: other programs may take the processor for seconds.
    command = [sys.executable, "-m", "benchmarks.soak", "--health-milliseconds", "30000", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reads slowly: ended" in done.stdout
    assert "vanishes: ended" in done.stdout
    assert "sends garbage: ended" in done.stdout


@pytest.mark.parametrize("flag", ["--uvloop", "--no-uvloop"])
def test_a_short_soak_leaves_nothing(flag: str) -> None:
    load = ["--clients", "30", "--requests", "300", "--seconds", "100", "--timeout-seconds", "60"]
    soak("--server", "tests.faults.serve_toy", *load, "--", flag, seconds=120)


@pytest.mark.usefixtures("smollm")
def test_two_minutes_of_the_default_model_leave_nothing() -> None:
    load = ["--clients", "1000", "--seconds", "120", "--prompts", "32", "--max-tokens", "16"]
    soak(*load, seconds=600)


def test_a_whole_stream_has_an_answer() -> None:
    text = b'data: {"choices": [{"text": "a", "finish_reason": %s}]}\n\n'
    outcome = read_answer(STREAM, response(text % b"null", text % b'"stop"', b"data: [DONE]\n\n"))
    assert (outcome.answer, outcome.fault) == ("stop: aa", "")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (response(b'data: {"choices": []}\n\n', is_whole=False), "is cut"),
        (response(b'data: {"choices": []}\n\n'), r"no \[DONE\]"),
        (response(b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"), "no finish_reason"),
        (response(b'data: {"error": {"code": "x"}}\n\n', b"data: [DONE]\n\n"), "'code': 'x'"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\nbroken", "got 500"),
        (b"", "got 0"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_fault(data: bytes, fault: str) -> None:
    outcome = read_answer(STREAM, data)
    assert outcome.answer is None
    assert re.search(fault, outcome.fault), outcome.fault


def test_clients_behave_by_their_shares() -> None:
    rng = random.Random(0)
    found = Counter(Shares().choose(rng) for _ in range(10_000))
    assert found[Behaviour.VANISHES] == pytest.approx(3_000, rel=0.1)
    assert found[Behaviour.READS_SLOWLY] == pytest.approx(1_000, rel=0.15)
    assert found[Behaviour.SENDS_GARBAGE] == pytest.approx(500, rel=0.2)


def test_a_seed_gives_the_same_requests() -> None:
    def first(seed: int) -> list[Prepared]:
        return token_requests(5, 8, seed) + list(itertools.islice(mixed_requests(8, seed), 50))

    assert first(1) == first(1)
    assert first(1) != first(2)
    kinds = {request.name.split()[0] for request in first(1)}
    assert kinds == {"tokens", "chat", "schema", "tools", "regex"}
