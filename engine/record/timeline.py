"""Converts a record to Chrome's trace format: steps on the device, and the phases of every request.

Perfetto (ui.perfetto.dev) and chrome://tracing open it. The format is a JSON array of events ("Trace Event
Format", Google), moments and durations in microseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from engine.outputs import StepPlan
from engine.record.reader import Arrived, Completed, Ended, Planned, Record

DEVICE, REQUESTS = 1, 2
TraceEvent = dict[str, Any]


@dataclass(slots=True)
class _Request:
    """A running request: its phase, since when, and the last step with a row of it."""

    name: str
    phase: str
    since: float
    last_step: int = -1


@dataclass
class Timeline:
    """Turns the events of a record into trace events, in one pass."""

    _requests: dict[int, _Request] = field(default_factory=dict)
    _plans: dict[int, tuple[StepPlan, float]] = field(default_factory=dict)
    _now: float = 0.0

    def events(self, record: Record) -> Iterator[TraceEvent]:
        """Yield all trace events. Raises ValueError for an invalid record."""
        for pid, name in ((DEVICE, "device"), (REQUESTS, "requests")):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        moments: dict[int, float] = {}
        for event in record.events():
            match event:
                case Arrived(at, sequence_id, request_id, prompt):
                    self._now = at
                    self._requests[sequence_id] = _Request(request_id, "queue", at)
                    yield self._async("b", sequence_id, request_id, at, prompt_tokens=len(prompt))
                    yield self._async("b", sequence_id, "queue", at)
                case Planned(at, plan):
                    self._now = moments[plan.step_id] = at
                    yield from self._plan(plan, moments)
                case Completed():
                    self._now = max(self._now, event.end)
                    yield from self._step(event)
                case Ended(at, sequence_id, reason):
                    self._now = at
                    yield from self._end(sequence_id, at, reason.value)
        for sequence_id in list(self._requests):
            yield from self._end(sequence_id, self._now, "unknown")

    def _plan(self, plan: StepPlan, moments: dict[int, float]) -> Iterator[TraceEvent]:
        self._plans[plan.step_id] = plan, moments[plan.step_id]
        for index in plan.inits:
            sequence_id = plan.sequence_ids[index]
            request = self._requests.get(sequence_id)
            if request is not None and request.last_step >= 0:
                # It starts again, so the first plan without a row of it preempted it.
                yield from self._enter(sequence_id, request, "preempted", moments[request.last_step + 1])
        for sequence_id in plan.sequence_ids:
            if (request := self._requests.get(sequence_id)) is not None:
                request.last_step = plan.step_id

    def _step(self, completed: Completed) -> Iterator[TraceEvent]:
        """Yield a step on the device, and the requests that change their phase with it."""
        plan, _ = self._plans.pop(completed.step_id)
        num_decode = plan.num_decode_rows
        name = "mixed" if 0 < num_decode < plan.num_rows else "decode" if num_decode else "prefill"
        yield {
            "ph": "X",
            "name": name,
            "cat": "step",
            "pid": DEVICE,
            "tid": 0,
            "ts": _microseconds(completed.start),
            "dur": _microseconds(completed.end - completed.start),
            "args": {
                "step": plan.step_id,
                "rows": plan.num_rows,
                "tokens": plan.num_tokens,
                "decode_rows": num_decode,
                "prefill_tokens": plan.num_tokens - num_decode,
                "page_copies": len(plan.page_copies),
            },
        }
        for index in plan.token_ids:
            sequence_id = plan.sequence_ids[index]
            request = self._requests.get(sequence_id)
            if request is None:
                continue
            if request.phase in ("queue", "preempted"):
                yield from self._enter(sequence_id, request, "prefill", completed.start)
            if plan.num_logits[index] and request.phase == "prefill":
                yield from self._enter(sequence_id, request, "decode", completed.end)

    def _enter(self, sequence_id: int, request: _Request, phase: str, at: float) -> Iterator[TraceEvent]:
        at = max(at, request.since)
        yield self._async("e", sequence_id, request.phase, at)
        yield self._async("b", sequence_id, phase, at)
        request.phase, request.since = phase, at

    def _end(self, sequence_id: int, at: float, reason: str) -> Iterator[TraceEvent]:
        if (request := self._requests.pop(sequence_id, None)) is not None:
            at = max(at, request.since)
            yield self._async("e", sequence_id, request.phase, at)
            yield self._async("e", sequence_id, request.name, at, finish_reason=reason)

    def _async(self, kind: str, sequence_id: int, name: str, at: float, **args: Any) -> TraceEvent:
        return {
            "ph": kind,
            "name": name,
            "cat": "request",
            "id": sequence_id,
            "pid": REQUESTS,
            "tid": 0,
            "ts": _microseconds(at),
            "args": args,
        }


def write_timeline(path: Path, target: Path) -> str | None:
    """Convert a record; return why it ends, if it was not closed.

    Raises ValueError for a file that is no record, and for a target that cannot be written or is a file
    already.
    """
    record = Record(path)
    if target.is_file():
        raise ValueError(f"{target} exists already, and is not overwritten")
    try:
        with target.open("wb") as file:
            file.write(b"[\n")
            for index, event in enumerate(Timeline().events(record)):
                file.write((b",\n" if index else b"") + orjson.dumps(event))
            file.write(b"\n]\n")
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error.strerror})") from None
    return record.ending


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
