"""Asks the server for its model name, and for its metrics before and after a run."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from server.commands.client import NO_SOCKS, ClientSettings

IDLE_SECONDS = "monoloop_device_idle_seconds_total"
LOOP_LAG_BUCKET = "monoloop_loop_lag_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters read from `/metrics` once; None and empty where the server has no such metric."""

    idle_seconds: float | None
    lag_buckets: dict[float, float]


class ServerInfo:
    """Asks a server the few things besides completions."""

    def __init__(self, settings: ClientSettings) -> None:
        self._url = settings.url
        self._options = settings.http_options(httpx.HTTPTransport)

    def first_model(self) -> str:
        """The first model the server lists. Raises ValueError that says why there is none."""
        try:
            return str(self._get("/v1/models").json()["data"][0]["id"])
        except httpx.HTTPStatusError as error:
            raise ValueError(f"{self._url}/v1/models answers {error.response.status_code}") from error
        except ImportError as error:  # httpx's, for a kind of proxy
            raise ValueError(NO_SOCKS) from error
        except httpx.HTTPError as error:
            raise ValueError(f"no server answers at {self._url}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url}/v1/models lists no model") from error

    def snapshot(self) -> Snapshot:
        """The server's counters now; a server without them gives an empty snapshot."""
        try:
            return parse_snapshot(self._get("/metrics").text)
        except (httpx.HTTPError, ImportError, ValueError):
            return Snapshot(None, {})

    def _get(self, path: str) -> httpx.Response:
        """Return an answer with a status of success. Raises httpx.HTTPError, ImportError."""
        with httpx.Client(timeout=10, **self._options) as client:
            return client.get(path).raise_for_status()


def parse_snapshot(text: str) -> Snapshot:
    """Pick our counters out of Prometheus' text format."""
    idle_seconds, buckets = None, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == IDLE_SECONDS:
                idle_seconds = sample.value
            elif sample.name == LOOP_LAG_BUCKET:
                buckets[float(sample.labels["le"])] = sample.value
    return Snapshot(idle_seconds, buckets)


def idle_share(before: Snapshot, after: Snapshot, elapsed_seconds: float) -> float | None:
    """Share of the run the device stood still while work was waiting, 0 to 1."""
    if before.idle_seconds is None or after.idle_seconds is None:
        return None
    return (after.idle_seconds - before.idle_seconds) / elapsed_seconds


def lag_quantile(before: Snapshot, after: Snapshot, quantile: float) -> float | None:
    """Quantile of the loop lag during the run, in seconds, linear inside a bucket as Prometheus does it."""
    bounds = sorted(after.lag_buckets)
    counts = [after.lag_buckets[bound] - before.lag_buckets.get(bound, 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    rank = quantile * counts[-1]
    low_bound, low_count = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if bound == float("inf"):
                return low_bound
            return low_bound + (bound - low_bound) * (rank - low_count) / max(1e-12, count - low_count)
        low_bound, low_count = bound, count
    return low_bound
