"""Sends the metrics to a Prometheus push gateway, where nothing can scrape the server."""

import asyncio
import logging
import socket
from urllib.parse import quote

import httpx

from server.metrics import CONTENT_TYPE, Metrics

logger = logging.getLogger("monoloop.server")

TIMEOUT_SECONDS = 10.0


class MetricsPush:
    """Replaces the metrics of this server at a gateway, which keeps those of other hosts and jobs apart."""

    def __init__(self, metrics: Metrics, url: str, job: str, port: int) -> None:
        instance = f"{socket.gethostname()}:{port}"
        self._url = f"{url.rstrip('/')}/metrics/job/{quote(job, safe='')}/instance/{quote(instance, safe='')}"
        self._metrics = metrics
        self._has_failed = False

    async def run(self, seconds: float) -> None:
        """Push every `seconds`, until cancelled."""
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS) as client:
            while True:
                await self.push(client)
                await asyncio.sleep(seconds)

    async def push(self, client: httpx.AsyncClient) -> None:
        """Push once. A gateway that cannot be reached is logged, once until it can be again."""
        headers = {"Content-Type": CONTENT_TYPE}
        try:
            answer = await client.put(self._url, content=self._metrics.exposition(), headers=headers)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if not self._has_failed:
                logger.warning("the metrics cannot be pushed to %s: %s", self._url, error)
            self._has_failed = True
            return
        if self._has_failed:
            logger.info("the metrics are pushed again")
        self._has_failed = False
