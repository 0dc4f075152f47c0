"""Models, health, readiness, load, version, metrics, and the description of the API.

Covers server/routes/openai/models.py.
"""

import json

import httpx
import pytest
from openai.types import Model
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import FinishReason
from engine.request import Request, SamplingParams
from engine.stats import EngineObserver, RequestTimes
from server.endpoint import Endpoint
from server.metrics import Histogram, Metrics, token_buckets
from server.openapi import document, main
from server.routes.table import ENDPOINTS, REFUSED
from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.foreign import NO_OPS
from server.schema.generate_parameters import GenerateParameters
from tests.server.conftest import ROOT, client_for
from tests.server.fake_engine import MODEL_NAME, FakeEngine


async def test_models(engine: FakeEngine) -> None:
    async with client_for(engine, served_model_name=("org/name", "short")) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["org/name", "short"]
        card = (await client.get("/v1/models/org/name")).json()
        assert card == listed["data"][0]
        Model.model_validate(card)
        assert (card["root"], card["max_model_len"], card["permission"]) == (MODEL_NAME, 4096, [])
        assert (await client.get("/v1/models/")).json() == listed
        assert (await client.get("/v1/models/name")).status_code == 404


async def test_health_and_ready_follow_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def statuses() -> tuple[int, int]:
        return (await client.get("/health")).status_code, (await client.get("/ready")).status_code

    assert await statuses() == (200, 200)
    assert (await client.get("/health")).content == b""
    engine.is_draining = True
    assert await statuses() == (200, 503)
    engine.is_draining = False
    engine.die()
    assert await statuses() == (503, 503)
    for path in ("/health", "/ready"):
        error = (await client.get(path)).json()["error"]
        assert error["message"] == "The engine has stopped after a fault."


async def test_before_the_model_is_there() -> None:
    async with client_for(None) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        for path in ("/ready", "/v1/models", "/v1/models/x", "/load"):
            response = await client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.json()["error"]["code"] == "server_is_overloaded"


async def test_load_and_version(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    load = (await client.get("/load")).json()
    assert load["server_load"] == 0
    assert load["pages_free"] == 1000
    engine.submit(Request("a", (1,) * 100, SamplingParams(max_tokens=1500)))
    load = (await client.get("/load")).json()
    assert (load["server_load"], load["running"], load["waiting"]) == (1, 1, 0)
    assert (load["kv_cache_usage"], load["predicted_kv_cache_usage"]) == (0.001, 0.1)
    assert (await client.get("/version")).json()["version"]


@pytest.mark.parametrize("path", ["/health", "/healthz", "/liveness", "/ready", "/readiness", "/load"])
async def test_probes_by_every_name_and_method(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 200
    response = await client.head(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_probes_need_no_key(engine: FakeEngine) -> None:
    async with client_for(engine, api_key=("k",)) as client:
        for path in ("/health", "/healthz", "/liveness", "/ready", "/readiness", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        for path in ("/load", "/token_load", "/tokenizer_info", "/get_model_name"):
            assert (await client.get(path)).status_code == 401


async def test_token_load(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    idle = {"current_load": 0, "logical_max_load": 0, "dynamic_max_load": 0}
    assert (await client.get("/token_load")).json() == idle
    engine.submit(Request("a", (1,) * 100, SamplingParams(max_tokens=1500)))
    load = (await client.get("/token_load")).json()
    assert load == {"current_load": 0.001, "logical_max_load": 0.1, "dynamic_max_load": 0.1}


async def test_model_name(engine: FakeEngine) -> None:
    async with client_for(engine, served_model_name=("org/name", "short")) as client:
        for method in ("GET", "POST"):
            assert (await client.request(method, "/get_model_name")).json() == {"model_name": "org/name"}


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """All series of an exposition, by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


CORE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:iteration_tokens_total_bucket",
    "monoloop_device_idle_share",
    "monoloop_loop_lag_seconds_bucket",
    "monoloop_step_seconds_bucket",
    "monoloop_step_tokens_bucket",
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "monoloop_evicted_pages_total",
    "monoloop_pages_used",
    "monoloop_pages_predicted",
    "monoloop_pages_cached",
    "monoloop_pages_free",
)


async def test_metrics(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": "tokens=3"})
    await client.get("/some/path/%s" % ("x" * 50))
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(response.text)
    assert not set(CORE) - set(found)
    for name in CORE:
        labels = found[name][0][0]
        assert labels["model_name"] == MODEL_NAME
        assert labels["engine"] == "0"
    assert found["vllm:generation_tokens_total"][0][1] == 3
    reasons = {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error"}
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
        assert found[name][0][1] > 0, name
    assert "python_gc_collections_total" in found
    answered = {(labels["route"], labels["status"]) for labels, _ in found["monoloop_http_requests_total"]}
    assert answered == {("/v1/completions", "200"), ("other", "404")}, "label values come from a closed set"


def test_observer_fills_the_histograms(engine: FakeEngine) -> None:
    metrics = Metrics()
    observer: EngineObserver = metrics
    metrics.attach(engine.stats, "m", 4096)
    observer.step_finished(0.01, 17, 3)
    observer.first_token(0.2)
    observer.inter_token(0.06, 3)
    observer.loop_lag(0.002)
    observer.request_finished(RequestTimes(FinishReason.ABORT, 5, 11, 100, 1, 2.0, 0.5, 0.5, 1.0, 0.0))
    observer.request_finished(RequestTimes(FinishReason.ABORT, 5, 0, 100, 0, 2.0, None, None, None, 0.0))
    found = samples(metrics.exposition().decode())

    def value(name: str, **labels: str) -> float:
        [result] = [value for given, value in found[name] if given.items() >= labels.items()]
        return result

    assert value("monoloop_step_tokens_sum") == 17
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value("vllm:time_to_first_token_seconds_bucket", le="0.25") == 1
    assert value("vllm:inter_token_latency_seconds_count") == 3
    assert value("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value("vllm:request_success_total", finished_reason="abort") == 2
    assert value("vllm:request_queue_time_seconds_count") == 1
    assert value("vllm:e2e_request_latency_seconds_count") == 2
    assert value("vllm:request_inference_time_seconds_sum") == 1.5
    assert value("vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value("monoloop_loop_lag_seconds_bucket", le="0.002") == 1


def test_histogram_counts_as_prometheus_does() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 8


def test_token_buckets() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(8192)[-1] == 5000


def test_stored_digest_of_the_api_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "the API has changed; if it should, run: python -m server.openapi --write"


async def test_openapi_document_is_served_and_whole(client: httpx.AsyncClient) -> None:
    served = (await client.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(document()))
    assert served["openapi"] == "3.1.0"
    assert "/v1/models/{model}" in served["paths"]
    text = json.dumps(served)
    schemas = served["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= set(schemas), "every reference is defined"
    assert schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in ENDPOINTS if endpoint.request is not None])
async def test_examples_are_answered(client: httpx.AsyncClient, endpoint: Endpoint) -> None:
    for path in endpoint.paths:
        response = await client.post(path, json=endpoint.example)
        assert response.status_code == 200, response.text
        if response.headers["content-type"] == "application/json":
            assert endpoint.response is not None
            endpoint.response.model_validate(response.json())


def test_api_page_lists_every_field_that_is_refused_or_ignored() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    refused = {name for table in REFUSED.values() for name in table}
    declared = GenerateParameters.model_fields.keys()  # at the wrong place, they are named together
    for name in (refused - declared) | NO_OPS:
        assert f"`{name}`" in page, name


async def test_fields_are_declared_or_refused_but_never_both() -> None:
    schemas = document()["components"]["schemas"]
    for request in (ChatRequest, CompletionRequest):
        refused = {
            field
            for field, schema in schemas[request.__name__]["properties"].items()
            if "not supported" in str(schema)
        }
        assert refused == set(REFUSED[request])
    assert not {*REFUSED[ChatRequest], *REFUSED[CompletionRequest]} & NO_OPS
