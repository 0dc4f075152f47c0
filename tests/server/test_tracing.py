"""Spans of requests: their stages, attributes, parents and errors, and their way to a collector."""

import asyncio
import builtins
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.request import Request, SamplingParams
from server import lifecycle
from server.app import build_app
from server.config import ServerConfig
from server.flags import SettingsError
from server.tracing import MAX_TRACED_STREAMS, Traces
from tests.engine.toy_engine import toy_engine
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
STAGES = ["queue", "prefill", "decode"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A client of a traced application, and the spans it has ended."""

    def __init__(self, engine: FakeEngine) -> None:
        self.exporter = InMemorySpanExporter()
        traces = Traces(SimpleSpanProcessor(self.exporter))
        self.app = build_app(engine, ServerConfig(), traces=traces)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def chat(self, text: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post(CHAT, json=body, headers=headers)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    @property
    def server_span(self) -> ReadableSpan:
        (span,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        return span

    @property
    def stages(self) -> list[str]:
        """The names of its children, in order."""
        parent = self.server_span.context.span_id
        children = [span for span in self.spans if span.parent and span.parent.span_id == parent]
        return [span.name for span in children]


@pytest.fixture
async def traced(engine: FakeEngine) -> AsyncIterator[Traced]:
    found = Traced(engine)
    async with found.http:
        yield found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_stages(traced: Traced, engine: FakeEngine, stream: bool) -> None:
    engine.num_cached_tokens = 2
    answer = await traced.chat("tokens=3 secret", stream=stream)
    assert answer.status_code == 200
    span = traced.server_span
    assert (span.name, span.status.status_code) == (f"POST {CHAT}", StatusCode.UNSET)
    assert span.parent is None
    found = dict(span.attributes)
    assert found.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert found == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "url.path": CHAT,
        "url.scheme": "http",
        "monoloop.request_id": answer.headers["x-request-id"],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "monoloop",
        "gen_ai.request.model": "fake-model",
        "gen_ai.response.model": "fake-model",
        "gen_ai.usage.input_tokens": len("tokens=3 secret"),
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    assert traced.stages == STAGES
    assert all("secret" not in span.to_json() for span in traced.spans), "a span shows the prompt"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 2}}),
    ],
)
async def test_every_api_is_traced(traced: Traced, path: str, body: dict[str, Any]) -> None:
    answer = await traced.http.post(path, json={"model": "fake-model", **body})
    assert answer.status_code == 200, answer.text
    found = traced.server_span.attributes
    assert found["http.route"] == path
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["gen_ai.usage.output_tokens"] == 2
    assert traced.stages == STAGES


@pytest.mark.parametrize("duplicates", [1, 2])
async def test_the_span_of_the_client_is_the_parent(traced: Traced, duplicates: int) -> None:
    header = f"00-{TRACE}-{PARENT}-01"
    headers = [("traceparent", header)] * duplicates + [("tracestate", "a=1"), ("tracestate", "b=2")]
    await traced.http.get("/v1/models", headers=headers)
    span = traced.server_span
    if duplicates > 1:  # invalid, says W3C
        assert span.parent is None
        return
    assert (span.parent.trace_id, span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert span.parent.is_remote
    assert dict(span.context.trace_state) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("header", ["", "no", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", "é"])
async def test_a_wrong_traceparent_begins_a_trace(traced: Traced, header: str) -> None:
    assert (await traced.http.get("/v1/models", headers={"traceparent": header.encode()})).status_code == 200
    assert traced.server_span.parent is None


async def test_what_the_client_does_not_sample_is_not_exported(traced: Traced) -> None:
    answer = await traced.chat("hello", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert answer.status_code == 200
    assert traced.spans == ()


async def test_probes_are_not_traced(traced: Traced) -> None:
    for path in ("/health", "/metrics"):
        assert (await traced.http.get(path)).status_code == 200
    assert traced.spans == ()


@pytest.mark.parametrize(
    ("text", "stream", "failure", "stages"),
    [
        ("fail=0", False, "500", ["queue", "prefill"]),
        ("fail=2", False, "500", STAGES),
        ("fail=2", True, "error", STAGES),  # 200 had been sent
    ],
)
async def test_a_fault_is_an_error(
    traced: Traced, text: str, stream: bool, failure: str, stages: list[str]
) -> None:
    await traced.chat(text, stream=stream)
    span = traced.server_span
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, failure)
    assert "gen_ai.response.finish_reasons" not in span.attributes
    assert traced.stages == stages


async def test_a_fault_of_the_client_is_no_error_of_the_server(traced: Traced, engine: FakeEngine) -> None:
    engine.is_full = True
    for fields, status in (({"max_tokens": -1}, "400"), ({}, "429")):
        answer = await traced.chat("hello", **fields)
        span = traced.server_span
        assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.UNSET, status), (
            answer.text
        )
        assert not traced.stages
        traced.exporter.clear()


async def test_unknown_methods_and_paths_share_a_name(traced: Traced) -> None:
    await traced.http.request("BREW", "/teapot")
    assert traced.server_span.name == "_OTHER other"


async def test_an_exception_is_an_error(
    traced: Traced, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "submit_group", broken)
    assert (await traced.chat("hello")).status_code == 500
    span = traced.server_span
    assert (span.status.status_code, span.attributes["error.type"]) == (
        StatusCode.ERROR,
        "ZeroDivisionError",
    )


async def test_a_client_that_leaves_is_an_error(traced: Traced, engine: FakeEngine) -> None:
    request = asyncio.create_task(traced.chat("hang"))
    while not engine.live:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    request.cancel()
    await asyncio.wait([request])
    span = traced.server_span
    assert span.status.status_code is StatusCode.ERROR
    assert traced.stages == ["queue", "prefill"]


async def test_an_answer_of_many_choices_has_the_stages_of_the_first(traced: Traced) -> None:
    prompts = ["tokens=1"] * (MAX_TRACED_STREAMS + 4)
    answer = await traced.http.post("/v1/completions", json={"prompt": prompts})
    assert answer.status_code == 200, answer.text
    assert Counter(traced.stages) == dict.fromkeys(STAGES, MAX_TRACED_STREAMS)
    assert traced.server_span.attributes["gen_ai.usage.output_tokens"] == len(prompts)


async def test_the_stages_follow_each_other_in_the_engines_times(traced: Traced) -> None:
    before = time.time_ns()
    await traced.chat("tokens=2")
    after = time.time_ns()
    spans = {span.name: span for span in traced.spans}
    edges = [(spans[name].start_time, spans[name].end_time) for name in STAGES]
    assert edges[0][1] == edges[1][0] and edges[1][1] == edges[2][0], edges
    slack = 10**9  # the wall clock may be set meanwhile
    assert before - slack <= edges[0][0] <= edges[2][1] <= after + slack


async def test_the_times_of_a_request_come_at_its_end_or_at_once() -> None:
    async with toy_engine() as engine:
        taken: list[Any] = []
        stream = engine.submit(Request("a", (5, 6, 7), SamplingParams(max_tokens=4)))
        stream.when_ended(taken.append)
        assert not taken
        await stream.collect()
        stream.when_ended(taken.append)
        first, second = taken
        assert first is second
        assert (first.generation_tokens, None in (first.queue_seconds, first.decode_seconds)) == (4, False)

        aborted = engine.submit(Request("b", (5, 6, 7), SamplingParams(max_tokens=4)))
        ended = asyncio.Event()
        aborted.when_ended(lambda times: (taken.append(times), ended.set()))
        aborted.abort()
        await asyncio.wait_for(ended.wait(), 10)
        assert taken[-1].finish_reason == "abort"


def test_without_the_packages_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_sdk(name: str, *args: Any) -> Any:
        if name == "server.tracing":
            raise ModuleNotFoundError("No module named 'opentelemetry.sdk'")
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    assert lifecycle.open_traces(None) is None
    with pytest.raises(
        SettingsError, match=r"--otlp-endpoint: .*opentelemetry\.sdk.*pip install .\.\[otel\]"
    ):
        lifecycle.open_traces("http://collector:4318")


async def test_a_collector_that_does_not_answer_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans: Any) -> Any:
            answers.wait(30)

    traces = Traces(BatchSpanProcessor(Stuck()))
    traces.tracer.start_span("a").end()
    await traces.close(0.05)
    answers.set()
    assert "could not be exported within 0.05 s" in caplog.text


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """The address of a collector, and the paths and bodies it has taken."""
    taken: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", taken
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.slow
def test_a_server_exports_its_last_spans_when_it_ends(
    start: Callable[..., LiveServer], collector: tuple[str, list[tuple[str, bytes]]]
) -> None:
    url, taken = collector
    server = start("--otlp-endpoint", url, OTEL_BSP_SCHEDULE_DELAY="60000", OTEL_SERVICE_NAME="mine").ready()
    body = {"messages": [{"role": "user", "content": "tokens=2"}]}
    assert server.post(CHAT, json=body).status_code == 200
    assert not taken, "spans are exported on their own schedule"
    server.send(signal.SIGTERM)
    assert server.exit_code() == 0, server.log
    ((path, sent),) = taken
    assert path == "/v1/traces"
    (of_resource,) = ExportTraceServiceRequest.FromString(sent).resource_spans
    resource = {item.key: item.value.string_value for item in of_resource.resource.attributes}
    assert resource["service.name"] == "mine"
    names = [span.name for scope in of_resource.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([f"POST {CHAT}", *STAGES])
    assert "Traceback" not in server.log, server.log
