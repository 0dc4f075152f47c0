"""Traces of requests for OpenTelemetry: a span for each, and within it queue, prefill and decode.

    POST /v1/chat/completions          parent: the client's traceparent
      ├ queue                          arrival to first step
      ├ prefill                        first step to first token
      └ decode                         first token to last

Needs the packages of the extra otel; nothing imports this module unless traces are on. Attributes have the
names of OpenTelemetry's conventions for HTTP and generative AI. No span holds text of a prompt or an answer.
"""

import asyncio
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.outputs import FinishReason
from engine.stats import RequestTimes
from server.answer import Answer
from server.context import ServerContext
from server.metrics import METHODS
from server.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger("monoloop.server")

TRACES_PATH = "/v1/traces"
MAX_TRACED_STREAMS = 16  # of an answer with many choices or prompts
CHAT = frozenset(("/v1/chat/completions", "/v1/messages", "/v1/responses"))
COMPLETE = frozenset((FinishReason.STOP.value, FinishReason.LENGTH.value))
PROPAGATOR = TraceContextTextMapPropagator()


class Traces:
    """Where spans go. Ending a span appends it to a bounded queue, from which a thread exports."""

    def __init__(self, processor: SpanProcessor) -> None:
        named = Resource({"service.name": "monoloop", "service.version": VERSION})
        # The detector reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create().merge(named).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("monoloop", VERSION)

    @classmethod
    def to_collector(cls, endpoint: str) -> "Traces":
        """Return traces that are sent to a collector, an address with or without the path of traces."""
        url = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
        return cls(BatchSpanProcessor(OTLPSpanExporter(url)))

    def around(self, app: ASGIApp, context: ServerContext) -> ASGIApp:
        """Return the application with its requests traced."""
        return TracedRequests(app, context, self)

    async def close(self, seconds: float) -> None:
        """Export the spans that wait. Returns after `seconds` even if the collector does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, seconds)
        if thread.is_alive():
            logger.warning("the last traces could not be exported within %g s", seconds)


class TracedRequests:
    """A layer of the application, inside that which gives requests their ids. Probes are not traced."""

    def __init__(self, app: ASGIApp, context: ServerContext, traces: Traces) -> None:
        self.app = app
        self.context = context
        self.tracer = traces.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.context.probes:
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        span = self.tracer.start_span(method, parent_of(scope), SpanKind.SERVER)
        clock_ns = time.time_ns() - time.perf_counter_ns()
        status, raised = 0, ""

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting_status)
        except BaseException as error:
            raised = type(error).__qualname__
            raise
        finally:
            if span.is_recording():
                route = self.context.route_of(scope)
                span.update_name(f"{method} {route}")
                span.set_attributes(http_attributes(scope, method, route))
                answer: Answer | None = scope["state"].get("answer")
                note_end(span, status, raised, answer)
                if answer is not None:
                    span.set_attributes(answer_attributes(answer, route))
                    self.trace_stages(span, answer, clock_ns)
            span.end()

    def trace_stages(self, span: Span, answer: Answer, clock_ns: int) -> None:
        """Add the stages of each of an answer's requests to its span, once the request has ended."""
        parent = set_span_in_context(span, Context())
        for index, stream in enumerate(answer.streams[:MAX_TRACED_STREAMS]):
            stream.when_ended(partial(self.add_stages, parent, index, clock_ns))

    def add_stages(self, parent: Context, choice: int, clock_ns: int, times: RequestTimes) -> None:
        """Add the stages that a request reached; the one that it did not finish lasts to its end."""
        start = times.arrival_seconds
        end_of_request = start + times.end_to_end_seconds
        stages = {
            "queue": times.queue_seconds,
            "prefill": times.prefill_seconds,
            "decode": times.decode_seconds,
        }
        for name, seconds in stages.items():
            end = end_of_request if seconds is None else start + seconds
            stage = self.tracer.start_span(
                name,
                parent,
                attributes={"monoloop.choice": choice, "monoloop.preemptions": times.preemptions},
                start_time=clock_ns + round(start * 1e9),
            )
            stage.end(clock_ns + round(end * 1e9))
            if seconds is None:
                return
            start = end


def parent_of(scope: Scope) -> Context:
    """Return the client's span from its W3C headers; without valid ones, a trace begins."""
    headers = Headers(scope=scope)
    # Joined, several traceparent headers are invalid, and those of tracestate one list, as W3C has it.
    carrier = {name: ",".join(values) for name in PROPAGATOR.fields if (values := headers.getlist(name))}
    return PROPAGATOR.extract(carrier, Context())


def http_attributes(scope: Scope, method: str, route: str) -> "dict[str, AttributeValue]":
    """Return what a span says about its HTTP request."""
    return {
        "http.request.method": method,
        "http.route": route,
        "url.path": scope["path"][:200],
        "url.scheme": scope["scheme"],
        "monoloop.request_id": scope["state"]["request_id"],
    }


def answer_attributes(answer: Answer, route: str) -> "dict[str, AttributeValue]":
    """Return what a span says about its answer."""
    counts = answer.counts()
    return {
        "gen_ai.operation.name": "chat" if route in CHAT else "text_completion",
        "gen_ai.provider.name": "monoloop",
        "gen_ai.request.model": answer.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.id,
        "gen_ai.usage.input_tokens": counts.prompt,
        "gen_ai.usage.cache_read.input_tokens": counts.cached,
        "gen_ai.usage.output_tokens": counts.completion,
        "gen_ai.usage.reasoning.output_tokens": counts.reasoning,
    }


def note_end(span: Span, status: int, raised: str, answer: Answer | None) -> None:
    """Note how a request ended: its HTTP status, why its answer is complete, or what went wrong.

    A 4xx is the client's fault, so the span's status stays unset, as the HTTP conventions have it.
    """
    failure = raised or (str(status) if status >= 400 else "")
    if status:
        span.set_attribute("http.response.status_code", status)
    if answer is not None and answer.streams and not failure:
        reasons = answer.end.split(",")
        if COMPLETE.issuperset(reasons):
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        else:
            failure = answer.end
    if failure:
        span.set_attribute("error.type", failure)
        if raised or not 400 <= status < 500:
            span.set_status(StatusCode.ERROR, answer.end if answer is not None else None)
