"""Prometheus answers the dashboard's queries about a server; a push gateway takes a server's metrics."""

import json
import math
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.conftest import ROOT, LiveServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        None in map(shutil.which, ("prometheus", "promtool", "prometheus-pushgateway")),
        reason="needs prometheus and prometheus-pushgateway",
    ),
]

CONFIG = ROOT / "configs/prometheus.yml"
DASHBOARD = json.loads((ROOT / "configs/grafana/dashboards/monoloop.json").read_text())
WINDOW = "10s"  # in place of the dashboard's $__rate_interval
NUM_REQUESTS = 5


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait 20 s at most. Raises AssertionError, which says `what` has not happened."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Peer:
    """A program that listens on a port of loopback, and its HTTP API."""

    def __init__(self, command: str, *flags: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.http = httpx.Client(base_url=self.url, trust_env=False)
        with log.open("wb") as output:
            address = f"--web.listen-address=127.0.0.1:{port}"
            self.process = subprocess.Popen([command, address, *flags], stdout=output, stderr=output)
        wait_until(self.is_ready, f"{command} did not start: {log.read_text()}")

    def is_ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            assert self.process.poll() is None, self.log.read_text()
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of Prometheus' API."""
        answer = self.http.get(path, params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of a PromQL query, one for each series."""
        return [float(series["value"][1]) for series in self.get("/api/v1/query", query=query)["result"]]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """Runs programs that end with the test."""
    peers: list[Peer] = []

    def run_one(command: str, *flags: str) -> Peer:
        peers.append(Peer(command, *flags, log=tmp_path / f"{command}.log"))
        return peers[-1]

    yield run_one
    for peer in peers:
        peer.close()


def complete(server: LiveServer, times: int) -> None:
    for _ in range(times):
        answer = server.post("/v1/completions", json={"prompt": "tokens=20 delay=0.001"})
        assert answer.status_code == 200, answer.text


def test_every_query_of_the_dashboard_has_an_answer(
    start: Callable[..., LiveServer], run: Callable[..., Peer], tmp_path: Path
) -> None:
    server = start().ready()
    complete(server, 1)  # a series' first value is no increase, so those of routes must exist before
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "200ms"
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    prometheus = run(
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
    )
    finished = "sum(vllm:request_success_total)"
    wait_until(lambda: prometheus.values(finished) == [1], "the server was not scraped")
    complete(server, NUM_REQUESTS)
    wait_until(lambda: prometheus.values(finished) == [1 + NUM_REQUESTS], "no second scrape")

    [model] = DASHBOARD["templating"]["list"]
    metric, label = model["query"]["query"].removeprefix("label_values(").removesuffix(")").split(", ")
    names = prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": metric})
    assert names == ["fake-model"]
    empty = []
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$model", "|".join(names)).replace("$__rate_interval", WINDOW)
            if not any(map(math.isfinite, prometheus.values(query))):
                empty.append(f"{panel['title']}: {query}")
    assert not empty, "no data for\n" + "\n".join(empty)


def test_prometheus_accepts_the_configuration_and_the_metrics(start: Callable[..., LiveServer]) -> None:
    checked = subprocess.run(["promtool", "check", "config", CONFIG], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    server = start().ready()
    complete(server, 1)
    exposition = server.get("/metrics").text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=exposition, capture_output=True, text=True
    )
    remarks = [line for line in checked.stderr.splitlines() if not line.startswith("vllm:")]
    assert not remarks, "\n".join(remarks)  # the names of vLLM's are not those that promtool likes


def test_a_gateway_keeps_the_metrics_up_to_the_end(
    start: Callable[..., LiveServer], run: Callable[..., Peer], tmp_path: Path
) -> None:
    gateway = run("prometheus-pushgateway", "--persistence.file=")  # Debian's has one for all
    push = ("--metrics-push-url", gateway.url, "--metrics-push-seconds", "600", "--metrics-push-job", "a/b")
    server = start("--uds", str(tmp_path / "socket"), *push)
    server.wait_for("is ready after")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "socket"))) as client:
        assert client.post("http://server/v1/completions", json={"prompt": "tokens=3"}).status_code == 200
    server.send(signal.SIGTERM)
    assert server.exit_code() == 0, server.log
    assert "cannot be pushed" not in server.log, server.log
    text = gateway.http.get("/metrics").text
    [tokens] = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert f'instance="{socket.gethostname()}",job="a/b",model_name="fake-model"}} 3' in tokens, tokens
