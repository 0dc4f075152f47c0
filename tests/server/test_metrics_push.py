import asyncio
from base64 import urlsafe_b64decode

import httpx
import pytest

from server.metrics import CONTENT_TYPE, Metrics
from server.metrics_push import MetricsPush


async def test_the_metrics_replace_those_of_this_server_at_the_gateway() -> None:
    received: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        received.append(request)
        return httpx.Response(200)

    push = MetricsPush(Metrics(), "http://gateway:9091/", "a job", 8000)
    async with httpx.AsyncClient(transport=httpx.MockTransport(take)) as client:
        await push.push(client)
    (request,) = received
    assert request.method == "PUT"
    assert request.url.raw_path.startswith(b"/metrics/job/a%20job/instance/")
    assert request.url.raw_path.endswith(b"%3A8000")
    assert request.headers["content-type"] == CONTENT_TYPE
    assert b"process_cpu_seconds_total" in request.content
    assert request.content.endswith(b"\n")


async def test_a_job_with_a_slash_is_encoded_and_a_server_without_a_port_is_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    paths: list[str] = []

    def take(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(take)) as client:
        await MetricsPush(Metrics(), "http://gateway:9091", "a/b?c", None).push(client)
    [path] = paths
    _, _, key, job, *instance = path.split("/")
    assert (key, urlsafe_b64decode(job), instance) == ("job@base64", b"a/b?c", ["instance", "host"])


async def test_the_last_values_are_pushed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = asyncio.Queue[None]()

    async def note(self: MetricsPush, client: httpx.AsyncClient) -> None:
        pushed.put_nowait(None)

    monkeypatch.setattr(MetricsPush, "push", note)
    task = asyncio.create_task(MetricsPush(Metrics(), "http://gateway:9091", "a", 1).run(600))
    await asyncio.wait_for(pushed.get(), 10)
    task.cancel()
    await asyncio.wait((task,), timeout=10)
    assert task.cancelled() and pushed.qsize() == 1


async def test_a_gateway_that_fails_is_logged_once_until_it_works_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "monoloop.server")
    statuses = [0, 500, 200, 404]

    def answer(request: httpx.Request) -> httpx.Response:
        status = statuses.pop(0)
        if not status:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(status)

    push = MetricsPush(Metrics(), "http://gateway:9091", "monoloop", 8000)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        while statuses:
            await push.push(client)
    levels = [record.levelname for record in caplog.records if record.name == "monoloop.server"]
    assert levels == ["WARNING", "INFO", "WARNING"], caplog.text


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.ConnectError("no route"), "no route"),
        (httpx.Response(401), "HTTP status 401"),
    ],
)
async def test_the_log_has_a_reason_and_no_password(
    caplog: pytest.LogCaptureFixture, failure: Exception | httpx.Response, reason: str
) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        if isinstance(failure, Exception):
            raise failure
        return failure

    async with httpx.AsyncClient(transport=httpx.MockTransport(fail)) as client:
        await MetricsPush(Metrics(), "http://u:sesame@gw:9091", "a/b", 1).push(client)
    assert caplog.messages == [f"the metrics cannot be pushed to http://u:***@gw:9091: {reason}"]
