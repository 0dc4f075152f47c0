"""deploy/nginx.conf in a real nginx before two servers: streams, sticky prefixes, one killed, one drained."""

import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.server.conftest import ROOT, LiveServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx"),
]

# What Debian's /etc/nginx/nginx.conf has around the files that it includes, in a folder of the test.
MAIN = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/monoloop.conf;
}}
"""


class Site(NamedTuple):
    url: str
    servers: tuple[LiveServer, LiveServer]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def nginx(folder: Path, *ports: int) -> Iterator[str]:
    """Run nginx before servers at these two ports; yield its address."""
    port = free_port()
    conf = (ROOT / "deploy/nginx.conf").read_text()
    for old, new in zip((8001, 8002), ports, strict=True):
        conf = conf.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    (folder / "monoloop.conf").write_text(conf.replace("listen 8000;", f"listen 127.0.0.1:{port};"))
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    process = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"])
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def site(start: Callable[..., LiveServer], tmp_path: Path) -> Iterator[Site]:
    servers = start(), start()
    with nginx(tmp_path, *(server.ready().port for server in servers)) as url:
        yield Site(url, servers)


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def post(site: Site, content: str, **headers: str) -> httpx.Response:
    url = f"{site.url}/v1/chat/completions"
    return httpx.post(url, json=body(content), headers=headers, timeout=20, trust_env=False)


def answered(server: LiveServer) -> int:
    """How many tokens a server has made."""
    found = re.search(r"^vllm:generation_tokens_total\{.*\} (.*)$", server.get("/metrics").text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def running(server: LiveServer) -> int:
    found = re.search(r"^vllm:num_requests_running\{.*\} (.*)$", server.get("/metrics").text, re.MULTILINE)
    assert found
    return int(float(found[1]))


class Reader(threading.Thread):
    """Reads a stream; `lines` has its events, `error` the way it broke off."""

    def __init__(self, site: Site, content: str) -> None:
        super().__init__(daemon=True)
        self.url, self.content = f"{site.url}/v1/chat/completions", content
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.error: httpx.TransportError | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST",
                self.url,
                json=body(self.content, stream=True, max_tokens=1000),
                timeout=20,
                trust_env=False,
            ) as response:
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
        return self.error is None and self.lines[-1:] == ["data: [DONE]"]


def test_tokens_arrive_one_by_one_and_a_client_that_leaves_is_noticed(site: Site) -> None:
    request = body("tokens=500 delay=1", stream=True, max_tokens=500)
    with httpx.stream(
        "POST", f"{site.url}/v1/chat/completions", json=request, timeout=10, trust_env=False
    ) as response:
        lines = response.iter_lines()  # its end would close the connection
        assert next(line for line in lines if "t0" in line)
        assert sum(map(answered, site.servers)) < 5, "the first token came with later ones"
        assert sum(map(running, site.servers)) == 1
    for _ in range(100):
        if not sum(map(running, site.servers)):
            return
        time.sleep(0.05)
    raise AssertionError("the request of a client that left goes on")


def test_requests_with_one_beginning_or_session_go_to_one_server(site: Site) -> None:
    one, other = site.servers

    def shares(send: Callable[[int], httpx.Response], count: int = 12) -> list[int]:
        before = answered(one), answered(other)
        assert {send(i).status_code for i in range(count)} == {200}
        after = answered(one), answered(other)
        return sorted((b - a) // 5 for a, b in zip(before, after, strict=True))

    system = "You are patient. " * 80
    assert shares(lambda i: post(site, f"{system} {i}")) == [0, 12]
    assert shares(lambda i: post(site, f"{i}", **{"x-session-id": "ada"})) == [0, 12]
    fewest, most = shares(lambda i: post(site, f"{i} is a number"), 40)
    assert fewest >= 5, f"{fewest} and {most} of 40 requests"


def test_a_killed_server_costs_its_streams_and_no_other_request(site: Site) -> None:
    readers = [Reader(site, f"{i} tokens=100 delay=0.03") for i in range(24)]
    assert all(reader.begun.wait(20) for reader in readers)
    victim, other = site.servers
    lost = running(victim)
    assert lost and running(other)
    victim.process.kill()
    statuses = [post(site, f"{i} after").status_code for i in range(40)]
    assert statuses == [200] * 40, statuses
    complete = [reader.is_complete for reader in readers]
    assert complete.count(False) == lost, f"{lost} streams ran on the killed server"
    assert all(
        reader.error or reader.lines[-1] != "data: [DONE]" for reader in readers if not reader.is_complete
    )


def test_a_server_that_drains_finishes_its_streams_and_gets_no_more(site: Site) -> None:
    readers = [Reader(site, f"{i} tokens=100 delay=0.03") for i in range(16)]
    assert all(reader.begun.wait(20) for reader in readers)
    leaving, other = site.servers
    assert running(leaving) and running(other)
    leaving.send(signal.SIGTERM)
    leaving.wait_for("finishing what runs")
    statuses = [post(site, f"{i} after").status_code for i in range(40)]
    assert statuses == [200] * 40, statuses
    assert all(reader.is_complete for reader in readers)
    assert leaving.exit_code() == 0
    texts = [[json.loads(line[6:]) for line in reader.lines[:-1]] for reader in readers]
    assert all(events[-1]["choices"][0]["finish_reason"] == "stop" for events in texts)


def test_a_machine_that_is_gone_without_a_reset_costs_no_request(
    start: Callable[..., LiveServer], tmp_path: Path
) -> None:
    server = start()
    with ExitStack() as stack:
        gone = stack.enter_context(socket.socket())
        gone.bind(("127.0.0.1", 0))
        gone.listen(0)
        for _ in range(4):  # they fill its queue: whoever connects after them gets no answer
            peer = stack.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(gone.getsockname())
        url = stack.enter_context(nginx(tmp_path, server.ready().port, gone.getsockname()[1]))
        site = Site(url, (server, server))
        statuses = [post(site, f"{i} is a number").status_code for i in range(12)]
    assert statuses == [200] * 12, statuses
