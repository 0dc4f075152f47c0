"""The load benchmark against a scripted server on loopback: what it sends, counts and prints.

Covers server/commands/bench/command.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from server import cli
from server.commands.bench import BenchSettings, run
from server.commands.bench.client import Client, ResponseReader, Result
from server.commands.bench.load import Run, drive
from server.commands.bench.plot import plot
from server.commands.bench.report import make_report, percentiles, table
from server.commands.bench.scrape import Snapshot, idle_share, lag_quantile, parse_snapshot
from server.commands.bench.workload import arrival_times, jobs, read_lengths
from server.commands.chat import ChatSettings
from server.commands.client import ClientSettings

METRICS = """# TYPE monoloop_device_idle_seconds_total counter
monoloop_device_idle_seconds_total 2.5
# TYPE monoloop_loop_lag_seconds histogram
monoloop_loop_lag_seconds_bucket{le="0.001"} 90
monoloop_loop_lag_seconds_bucket{le="0.01"} 100
monoloop_loop_lag_seconds_bucket{le="+Inf"} 100
monoloop_loop_lag_seconds_sum 0.1
monoloop_loop_lag_seconds_count 100
"""


def event(text: str, num_tokens: int, finish_reason: str | None = None) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens}
    chunk = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": usage}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


FINAL_USAGE = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}\n\n'
)
GOOD_STREAM = [
    event("a", 1),
    event("bc", 3),
    event("", 3),
    event("d", 4, "length"),
    FINAL_USAGE,
    b"data: [DONE]\n\n",
]


class ScriptedServer:
    """Answers every completion with the same events and keeps what it was sent; knows one model.

    No stream begins before `together` of them have been asked for, so how many run at a time does not depend
    on how fast the two sides of a connection are.
    """

    def __init__(
        self,
        events: list[bytes],
        status: str = "200 OK",
        content_type: str = "text/event-stream",
        together: int = 1,
    ) -> None:
        self.events = events
        self.barrier = asyncio.Barrier(together)
        self.head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.most_at_once = 0
        self._now = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET "):
            answer = METRICS if "/metrics" in head else '{"data": [{"id": "scripted"}]}'
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode())
            return
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        self.heads.append(head)
        self.bodies.append(json.loads(await reader.readexactly(length)))
        await self.barrier.wait()
        writer.write(self.head.encode())
        *events, last = self.events
        for part in events:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            await asyncio.sleep(0.001)
        self._now -= 1  # before the client can read the end: it may send its next request at once
        writer.write(f"{len(last):x}\r\n".encode() + last + b"\r\n0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def serving(handler: Any) -> AsyncIterator[str]:
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        with suppress(ConnectionError):
            await handler(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*connections)


async def stream_once(handler: Any, timeout_seconds: float = 10) -> Result:
    async with serving(handler) as url:
        return await Client(url, "key", timeout_seconds).stream(jobs([(3, 4)], "m", seed=0)[0])


async def test_a_stream_is_counted_by_its_usage() -> None:
    server = ScriptedServer(GOOD_STREAM)
    result = await stream_once(server)
    assert result.error is None
    assert (result.prompt_tokens, result.output_tokens, result.first_chunk_tokens) == (3, 4, 1)
    assert len(result.chunk_seconds) == 3, "chunks without text carry no content"
    assert result.start_seconds < result.chunk_seconds[0] <= result.chunk_seconds[-1] <= result.end_seconds
    assert result.tpot_seconds == pytest.approx((result.chunk_seconds[-1] - result.chunk_seconds[0]) / 3)
    body = server.bodies[0]
    assert len(body["prompt"]) == 3
    assert body["max_tokens"] == 4
    assert body["ignore_eos"] is True
    assert body["stream_options"]["include_usage"] is True
    assert "Authorization: Bearer key\r\n" in server.heads[0]


async def test_text_that_shows_nothing_still_has_a_first_chunk() -> None:
    result = await stream_once(ScriptedServer([event("", 2), event("", 4, "length"), b"data: [DONE]\n\n"]))
    assert result.error is None
    assert len(result.chunk_seconds) == 1
    assert result.tpot_seconds is None


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            ScriptedServer([b'{"error": {"message": "no such model"}}'], "404 Not Found"),
            "HTTP 404: no such model",
        ),
        (ScriptedServer([b"<html>"], "502 Bad Gateway"), "HTTP 502: <html>"),
        (ScriptedServer([event("a", 1), b'data: {"error": {"message": "step failed"}}\n\n']), "step failed"),
        (ScriptedServer([event("a", 1)]), "the stream ended without [DONE]"),
        (ScriptedServer([b"data: [DONE]\n\n"]), "the stream had no content"),
        (ScriptedServer([b"data: {not json}\n\n"]), "unreadable response"),
    ],
)
async def test_faults_end_in_the_result(server: ScriptedServer, message: str) -> None:
    result = await stream_once(server)
    assert result.error is not None
    assert message in result.error


async def test_a_silent_server_times_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    result = await stream_once(silent, timeout_seconds=0.05)
    assert result.error == "no end within 0.05 s"


async def test_no_server_is_an_error_in_the_result() -> None:
    async with serving(ScriptedServer([])) as url:
        pass
    result = await Client(url).stream(jobs([(1, 1)], "m", seed=0)[0])
    assert result.error is not None


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_a_response_reads_the_same_however_it_is_cut(cut: int) -> None:
    response = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n\r\n"
    )
    reader = ResponseReader()
    body = b"".join(reader.feed(response[at : at + cut]) for at in range(0, len(response), cut))
    assert (reader.status, body, reader.complete) == (200, b"hello world", True)


def test_a_response_with_a_length_ends_there() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nno") == b"no"
    assert not reader.complete
    assert reader.feed(b"pe") == b"pe"
    assert reader.complete


async def test_streams_run_at_most_so_many_at_a_time() -> None:
    server = ScriptedServer(GOOD_STREAM, together=3)
    async with serving(server) as url:
        seen: list[Result] = []
        outcome = await drive(
            Client(url, timeout_seconds=30), jobs([(3, 4)] * 12, "m", seed=1), 3, seen.append
        )
    assert len(outcome.results) == len(seen) == 12
    assert server.most_at_once == 3
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12, "prompts share nothing"


async def test_arrivals_do_not_wait_for_streams_to_end() -> None:
    server = ScriptedServer(GOOD_STREAM, together=8)
    async with serving(server) as url:
        work = jobs([(3, 4)] * 8, "m", seed=1, rate=10_000, arrivals="fixed")
        outcome = await drive(Client(url, timeout_seconds=30), work, None)
    assert [result.error for result in outcome.results] == [None] * 8
    assert server.most_at_once == 8


def test_a_seed_fixes_prompts_and_arrivals() -> None:
    first, second = (jobs([(5, 1)] * 20, "m", seed=7, rate=4) for _ in range(2))
    other = jobs([(5, 1)] * 20, "m", seed=8, rate=4)
    assert first == second
    assert [job.body["prompt"] for job in first] != [job.body["prompt"] for job in other]
    assert [job.arrival_seconds for job in first] != [job.arrival_seconds for job in other]


def test_arrival_times() -> None:
    import random

    assert arrival_times(3, None, "poisson", random.Random(0)) == [0, 0, 0]
    assert arrival_times(3, 2, "fixed", random.Random(0)) == [0, 0.5, 1]
    times = arrival_times(4000, 10, "poisson", random.Random(0))
    assert times == sorted(times)
    assert 4000 / times[-1] == pytest.approx(10, rel=0.05)


def test_workload_files(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"requests": [[3, 4], [5, 6]]}')
    assert read_lengths(path) == [(3, 4), (5, 6)]
    for text in ("nonsense", "[]", '{"requests": []}', '{"requests": [[1]]}', '{"requests": [[0, 3]]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"w\.json"):
            read_lengths(path)
    with pytest.raises(ValueError, match="No such file"):
        read_lengths(tmp_path / "missing.json")


def test_percentiles_are_linear_between_ranks() -> None:
    values = percentiles([float(value) for value in range(101)])
    assert values is not None
    assert (values.p50, values.p90, values.p99) == (50, 90, 99)
    assert percentiles([]) is None


def test_a_report_sums_up_good_and_failed_requests() -> None:
    good = Result(
        10, 5, start_seconds=1.0, end_seconds=2.0, chunk_seconds=[1.25, 1.5, 2.0], first_chunk_tokens=1
    )
    failed = Result(10, 1, start_seconds=1.0, end_seconds=1.5, chunk_seconds=[1.1], error="boom")
    before, after = Snapshot(1.0, {0.001: 0.0}), Snapshot(1.5, {0.001: 10.0})
    report = make_report(Run([good, failed], [0.001] * 3, elapsed_seconds=2.0), before, after)
    assert (report.requests, report.errors, report.error_messages) == (2, 1, {"boom": 1})
    assert (report.input_tokens_per_second, report.output_tokens_per_second) == (5, 3)
    assert report.ttft is not None
    assert report.ttft.p50 == 0.25
    assert report.itl is not None
    assert report.itl.p50 == pytest.approx(0.375)
    assert report.tpot is not None
    assert report.tpot.p50 == pytest.approx(0.75 / 4)
    assert report.device_idle_share == 0.25
    assert table(report).row_count == 13


def test_metrics_are_read_as_a_difference() -> None:
    after = parse_snapshot(METRICS)
    before = Snapshot(0.5, {0.001: 0.0, 0.01: 0.0, float("inf"): 0.0})
    assert idle_share(before, after, 10) == pytest.approx(0.2)
    assert lag_quantile(before, after, 0.5) == pytest.approx(0.001 * 50 / 90)
    assert lag_quantile(before, after, 0.95) == pytest.approx(0.001 + 0.009 * 0.5)
    nothing = parse_snapshot("")
    assert idle_share(nothing, nothing, 1) is None
    assert lag_quantile(after, after, 0.99) is None


async def test_the_command_prints_one_table_and_writes_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, picture = tmp_path / "out.json", tmp_path / "out.png"
    async with serving(ScriptedServer(GOOD_STREAM)) as url:
        settings = BenchSettings(url=url, requests=4, concurrency=2, json=json_file, plot=picture)
        assert await asyncio.to_thread(run, settings) == 0
    output = capsys.readouterr().out
    for words in (
        "scripted",
        "requests",
        "errors",
        "output tokens/s",
        "TTFT",
        "ITL",
        "TPOT",
        "end to end",
        "loop lag",
    ):
        assert words in output
    document = json.loads(json_file.read_text())
    assert document["report"]["output_tokens"] == 16
    assert document["settings"]["seed"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_failed_requests_are_told_and_change_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusing = ScriptedServer([b'{"error": {"message": "queue is full"}}'], "429 Too Many Requests")
    async with serving(refusing) as url:
        assert await asyncio.to_thread(run, BenchSettings(url=url, model="m", requests=3)) == 1
    assert "3 × HTTP 429: queue is full" in capsys.readouterr().out


def test_a_wrong_address_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BenchSettings(url="ftp://x")) == 1
    assert "no http:// or https:// address" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("nope/x", "there is no folder"), ("", "is a folder"), ("x" * 300, "cannot be written")],
)
async def test_a_file_that_cannot_be_written_is_told_before_the_first_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, place: str, words: str
) -> None:
    server = ScriptedServer(GOOD_STREAM)
    async with serving(server) as url:
        arguments = ["bench", "--url", url, "--requests", "1", flag, str(tmp_path / place)]
        assert await asyncio.to_thread(cli.main, arguments) == 2
    assert not server.bodies
    shown = capsys.readouterr().err
    assert f"error: {flag} {tmp_path}" in shown
    assert words in shown


async def test_a_disk_that_is_full_is_told_after_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.commands.bench.command.plot", full)
    async with serving(ScriptedServer(GOOD_STREAM)) as url:
        settings = BenchSettings(url=url, requests=1, plot=tmp_path / "out")
        assert await asyncio.to_thread(run, settings) == 1
    shown = capsys.readouterr()
    assert "TTFT" in shown.out
    assert "No space left" in shown.err


def test_a_plot_of_nothing_is_still_a_picture(tmp_path: Path) -> None:
    plot(Run(elapsed_seconds=1.0), "empty", tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes().startswith(b"\x89PNG"), "whatever its name"


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "127.0.0.1:8000"),
        ({"PORT": "9000"}, "127.0.0.1:9000"),
        ({"PORT": "tcp://10.0.0.1:80"}, "127.0.0.1:8000"),
        ({"HOST": "0.0.0.0"}, "127.0.0.1:8000"),
        ({"CONFIG": "settings.yaml"}, "10.0.0.7:9003"),
        ({"CONFIG": "settings.yaml", "PORT": "9000"}, "10.0.0.7:9000"),
    ],
)
def test_the_server_is_looked_for_where_this_environment_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], url: str
) -> None:
    (tmp_path / "settings.yaml").write_text("port: 9003\nhost: 10.0.0.7\n")
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "HOST", "PORT"):
        monkeypatch.delenv(f"MONOLOOP_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"MONOLOOP_{name}", value)
    assert ClientSettings().url == ChatSettings().url == f"http://{url}"


@pytest.mark.parametrize("text", [None, "a: [", "\xff"])
def test_a_settings_file_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    monkeypatch.setenv("MONOLOOP_CONFIG", str(file))
    assert cli.main(["bench"]) == cli.USAGE
    assert "MONOLOOP_CONFIG: cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("10.0.0.7:9000/v1/", "http://10.0.0.7:9000"),
        ("https://a.example/v1", "https://a.example"),
    ],
)
def test_a_url_needs_neither_scheme_nor_a_version(given: str, url: str) -> None:
    assert ClientSettings(url=given).url == url


def test_a_benchmark_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "statc"]) == cli.USAGE
    assert "there is no benchmark 'statc'; there are static and kernel; did you mean static?" in (
        capsys.readouterr().err
    )
