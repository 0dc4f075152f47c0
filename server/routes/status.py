"""GET /health, /ready, /version, /load, /token_load and /metrics: for probes and load balancers."""

from starlette.requests import Request
from starlette.responses import Response

from server.context import context_of
from server.endpoint import Endpoint
from server.metrics import CONTENT_TYPE
from server.schema.models import Load, TokenLoad, Version
from server.version import VERSION


async def health(http: Request) -> Response:
    """Empty 200 while the process is worth keeping; it may still be loading or already draining."""
    context_of(http).check_healthy()
    return Response()


async def ready(http: Request) -> Response:
    """Empty 200 if a request sent now would be taken."""
    context_of(http).check_ready()
    return Response()


async def version(http: Request) -> Response:
    """The version."""
    return Response(Version(version=VERSION).model_dump_json(), media_type="application/json")


async def load(http: Request) -> Response:
    """Number of requests that run and wait, and pages in use."""
    stats = context_of(http).engine.stats()
    body = Load(
        server_load=stats.running + stats.waiting,
        running=stats.running,
        waiting=stats.waiting,
        kv_cache_usage=stats.kv_cache_usage,
        predicted_kv_cache_usage=stats.predicted_kv_cache_usage,
        pages_used=stats.pages_used,
        pages_cached=stats.pages_cached,
        pages_free=stats.pages_free,
    )
    return Response(body.model_dump_json(), media_type="application/json")


async def token_load(http: Request) -> Response:
    """Share of the KV cache in use, now and at its expected peak."""
    stats = context_of(http).engine.stats()
    peak = stats.predicted_kv_cache_usage
    body = TokenLoad(current_load=stats.kv_cache_usage, logical_max_load=peak, dynamic_max_load=peak)
    return Response(body.model_dump_json(), media_type="application/json")


async def metrics(http: Request) -> Response:
    """Prometheus metrics."""
    return Response(context_of(http).metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


ENDPOINTS = (
    Endpoint("GET", ("/health", "/healthz", "/liveness"), health, is_probe=True, is_open=True),
    Endpoint("GET", ("/ready", "/readiness"), ready, is_probe=True, is_open=True),
    Endpoint("GET", ("/version",), version, Version, is_probe=True, is_open=True),
    Endpoint("GET", ("/load",), load, Load, is_probe=True),
    Endpoint("GET", ("/token_load",), token_load, TokenLoad, is_probe=True),
    Endpoint("GET", ("/metrics",), metrics, is_probe=True, is_open=True),
)
