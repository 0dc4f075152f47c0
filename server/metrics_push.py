"""Sends the metrics to a Prometheus push gateway, where nothing can scrape the server."""

import asyncio
import logging
import socket
from base64 import urlsafe_b64encode
from urllib.parse import quote

import httpx

from server.metrics import CONTENT_TYPE, Metrics
from server.setting_types import without_credentials

logger = logging.getLogger("monoloop.server")

TIMEOUT_SECONDS = 10.0


class MetricsPush:
    """Replaces the metrics of this server at a gateway, which keeps those of other hosts and jobs apart."""

    def __init__(self, metrics: Metrics, url: str, job: str, number: int | None) -> None:
        """Name this server by its host and, if it has one, a `number`: a port or a process id."""
        instance = socket.gethostname() if number is None else f"{socket.gethostname()}:{number}"
        self._url = f"{url.rstrip('/')}/metrics/{in_path('job', job)}/{in_path('instance', instance)}"
        self._gateway = without_credentials(url)
        self._metrics = metrics
        self._has_failed = False

    async def run(self, seconds: float) -> None:
        """Push every `seconds` until cancelled, and then once more: the gateway keeps the last values."""
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
            try:
                while True:
                    await self.push(client)
                    await asyncio.sleep(seconds)
            finally:
                await self.push(client)

    async def push(self, client: httpx.AsyncClient) -> None:
        """Push once. A gateway that cannot be reached is logged, once until it can be again."""
        headers = {"Content-Type": CONTENT_TYPE}
        try:
            answer = await client.put(self._url, content=self._metrics.exposition(), headers=headers)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if not self._has_failed:
                logger.warning("the metrics cannot be pushed to %s: %s", self._gateway, reason(error))
            self._has_failed = True
            return
        if self._has_failed:
            logger.info("the metrics are pushed again")
        self._has_failed = False


def reason(error: Exception) -> str:
    """Return why a push failed. The text of an HTTP error has the address with its password."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP status {error.response.status_code}"
    return str(error) or type(error).__name__  # a time-out has no text


def in_path(label: str, value: str) -> str:
    """Return a label as part of a path. A gateway refuses values with a slash, quoted or not."""
    if "/" in value:
        return f"{label}@base64/{urlsafe_b64encode(value.encode()).decode()}"
    return f"{label}/{quote(value, safe='')}"
