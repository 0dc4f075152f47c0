"""deploy/ray_serve.py on a local Ray with two FakeEngines: streams, errors, a replica killed, one drained."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.test_deployment import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray"),
]
SESSIONS = [f"session-{i}" for i in range(12)]


class Cluster:
    """A Ray of its own, with a deployment of two replicas."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(folder),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve_on_ray", str(port)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.do("2")

    def do(self, command: str) -> None:
        """Have a command carried out."""
        self.begin(command)
        self.wait()

    def begin(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def wait(self) -> None:
        """Wait until the command is carried out."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("done"):
                return
        raise AssertionError(f"Ray has ended:\n{self.log.read_text()[-5000:]}")

    def get(self, path: str, session: str = "", **headers: str) -> httpx.Response:
        return httpx.get(
            self.url + path, headers={"x-session-id": session, **headers}, timeout=20, trust_env=False
        )

    def post(self, content: str, session: str = "") -> httpx.Response:
        return self.post_to("/v1/chat/completions", body(content), session)

    def post_to(self, path: str, body: dict[str, Any], session: str) -> httpx.Response:
        headers = {"x-session-id": session}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=20, trust_env=False)

    def metric(self, name: str, session: str) -> float:
        """A metric of the replica of a session."""
        found = re.search(rf"^{name}(?:{{.*}})? (.*)$", self.get("/metrics", session).text, re.MULTILINE)
        assert found
        return float(found[1])

    def replica_of(self, session: str) -> float:
        """When the process that answers a session has started."""
        return self.metric("process_start_time_seconds", session)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("ray"))
    yield found
    found.end()


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


class Reader(threading.Thread):
    """Reads a stream; `lines` has its events, `error` the way it broke off."""

    def __init__(self, cluster: Cluster, session: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.session = f"{cluster.url}/v1/chat/completions", session
        self.request = body(f"tokens={num_tokens} delay=0.05", stream=True, max_tokens=num_tokens)
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.error: httpx.TransportError | None = None
        self.start()

    def run(self) -> None:
        headers = {"x-session-id": self.session}
        try:
            with httpx.stream(
                "POST", self.url, json=self.request, headers=headers, timeout=20, trust_env=False
            ) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                    if "t0" in line:
                        self.begun.set()
        except httpx.TransportError as error:
            self.error = error
        self.begun.set()

    @property
    def is_complete(self) -> bool:
        self.join(30)
        assert self.error or self.lines[-1] == "data: [DONE]", "a stream that broke off looks complete"
        return self.error is None


def test_tokens_arrive_one_by_one_and_a_client_that_leaves_is_noticed(cluster: Cluster) -> None:
    request = body("tokens=500 delay=1", stream=True, max_tokens=500)
    headers = {"x-session-id": "leaver"}
    with httpx.stream(
        "POST",
        f"{cluster.url}/v1/chat/completions",
        json=request,
        headers=headers,
        timeout=20,
        trust_env=False,
    ) as response:
        lines = response.iter_lines()  # its end would close the connection
        assert next(line for line in lines if "t0" in line)
        assert cluster.metric("vllm:num_requests_running", "leaver") == 1
    for _ in range(100):
        if not cluster.metric("vllm:num_requests_running", "leaver"):
            return
        time.sleep(0.05)
    raise AssertionError("the request of a client that left goes on")


def test_answers_and_errors_are_those_of_the_server(cluster: Cluster) -> None:
    assert cluster.get("/ready").status_code == 200
    assert cluster.get("/v1/models", **{"x-request-id": "mine"}).headers.get_list("x-request-id") == ["mine"]
    answer = cluster.post("tokens=3").json()
    assert answer["choices"][0]["message"]["content"] == "t0 t1 t2 "
    refused = cluster.post("")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    failed = cluster.post("fail=0")
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")


def test_a_killed_replica_costs_its_streams_and_is_replaced(cluster: Cluster) -> None:
    replica_of = {session: cluster.replica_of(session) for session in SESSIONS}
    assert len({*replica_of.values()}) == 2, "all sessions are on one replica"
    readers = [Reader(cluster, session, 3000) for session in SESSIONS]
    assert all(reader.begun.wait(20) for reader in readers)
    cluster.begin("kill")
    for _ in range(400):
        if broken := [reader for reader in readers if reader.error]:
            break
        time.sleep(0.05)
    assert broken, "the streams of the killed replica go on"
    statuses = [cluster.post("after", session).status_code for session in SESSIONS]
    assert statuses == [200] * len(SESSIONS), statuses
    lost = replica_of[broken[0].session]
    on_others = [reader for reader in readers if replica_of[reader.session] != lost]
    assert not any(reader.is_complete for reader in readers if reader not in on_others)
    assert all(reader.is_alive() for reader in on_others), "streams of the other replica broke off"
    cluster.post_to("/abort", {"abort_all": True}, on_others[0].session)
    assert all(reader.is_complete for reader in on_others)
    cluster.wait()
    assert len({cluster.replica_of(session) for session in SESSIONS}) == 2


def test_scaling_lets_streams_end_and_no_request_fails(cluster: Cluster) -> None:
    before = {cluster.replica_of(session) for session in SESSIONS}
    readers = [Reader(cluster, session, 60) for session in SESSIONS]
    assert all(reader.begun.wait(20) for reader in readers)
    cluster.begin("1")
    statuses = [cluster.post("meanwhile", session).status_code for session in SESSIONS]
    assert all(reader.is_complete for reader in readers)
    cluster.wait()
    assert {cluster.replica_of(session) for session in SESSIONS} < before, (
        "the replica that stays was replaced"
    )
    statuses += [cluster.post("after", session).status_code for session in SESSIONS]
    assert statuses == [200] * len(statuses), statuses
