"""Timelines are valid Chrome traces, with the phases of every request."""

import asyncio
import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.record.reader import Completed, Planned, Record
from engine.record.timeline import write_timeline
from engine.request import Request, SamplingParams
from tests.engine.toy_engine import toy_engine

PHASES = {"queue", "prefill", "decode", "preempted"}


@pytest.fixture
async def path(tmp_path) -> Path:
    """Seven requests in a pool that is too small; the last is aborted while it waits."""
    path = tmp_path / "record"
    toy = {"num_pages": 16, "max_num_seqs": 3, "token_budget": 10, "overcommit": 1.0}
    async with toy_engine(record=path, **toy) as engine:
        requests = [
            Request(f"request-{index}", tuple(range(10 + index, 31)), SamplingParams(20, ignore_eos=True))
            for index in range(7)
        ]
        streams = [engine.submit(request) for request in requests]
        streams[-1].abort()
        results = await asyncio.gather(*(stream.collect() for stream in streams), return_exceptions=True)
        assert isinstance(results[-1], EngineError)
        assert engine.stats().preemptions_total > 0
    return path


def read(path: Path, target: Path) -> list[dict]:
    write_timeline(path, target)
    return json.loads(target.read_text())


def test_every_event_has_its_fields(path, tmp_path):
    events = read(path, tmp_path / "timeline.json")
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e"), event
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in ("b", "e"):
            assert event["cat"] == "request" and isinstance(event["id"], int)
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert named == {1: "device", 2: "requests"}
    assert {event["pid"] for event in events} == set(named)


def test_steps_have_their_times_and_sizes(path, tmp_path):
    steps = [event for event in read(path, tmp_path / "timeline.json") if event["ph"] == "X"]
    recorded = list(Record(path).events())
    plans = {event.plan.step_id: event.plan for event in recorded if isinstance(event, Planned)}
    completed = [event for event in recorded if isinstance(event, Completed)]
    assert len(steps) == len(completed)
    for step, event in zip(steps, completed, strict=True):
        plan = plans[event.step_id]
        assert step["ts"] == pytest.approx(1e6 * event.start, abs=1)
        assert step["dur"] == pytest.approx(1e6 * (event.end - event.start), abs=1)
        args = step["args"]
        assert (args["step"], args["rows"], args["tokens"]) == (plan.step_id, plan.num_rows, plan.num_tokens)
        assert args["decode_rows"] + args["prefill_tokens"] == args["tokens"]
    assert {step["name"] for step in steps} == {"prefill", "decode", "mixed"}
    starts = [step["ts"] for step in steps]
    assert starts == sorted(starts)


def test_phases_follow_each_other_without_gaps(path, tmp_path):
    spans = defaultdict(list)
    for event in read(path, tmp_path / "timeline.json"):
        if event["ph"] in ("b", "e"):
            spans[event["id"]].append(event)
    assert len(spans) == 7
    seen = Counter()
    for number, events in spans.items():
        first, *inner, last = events
        assert (first["ph"], last["ph"]) == ("b", "e")
        assert first["name"] == last["name"] == f"request-{number}"
        assert last["args"]["finish_reason"] == ("abort" if number == 6 else "length")
        phases = [event["name"] for event in inner[::2]]
        assert [event["ph"] for event in inner] == ["b", "e"] * len(phases)
        assert [event["name"] for event in inner[1::2]] == phases
        assert set(phases) <= PHASES and phases[0] == "queue"
        moments = [event["ts"] for event in events]
        assert moments == sorted(moments)
        for end, begin in zip(inner[1::2], inner[2::2], strict=False):
            assert end["ts"] == begin["ts"]
        seen.update(phases)
        for before, after in itertools.pairwise(phases):
            assert (before, after) in {
                ("queue", "prefill"),
                ("prefill", "decode"),
                ("prefill", "preempted"),
                ("decode", "preempted"),
                ("preempted", "prefill"),
            }
    assert seen["queue"] == 7 and seen["decode"] >= 6 and seen["preempted"] > 0
    assert [event["name"] for event in spans[6]] == ["request-6", "queue", "queue", "request-6"]


def test_the_timeline_of_a_truncated_record_is_valid_json(path, tmp_path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    target = tmp_path / "timeline.json"
    assert "in the middle of" in write_timeline(path, target)
    events = json.loads(target.read_text())
    kinds = Counter(event["ph"] for event in events)
    assert kinds["b"] == kinds["e"] > 0, "what is open ends with the record"
    reasons = [event["args"]["finish_reason"] for event in events if "finish_reason" in event["args"]]
    assert "unknown" in reasons


def test_unreadable_and_unwritable_files_are_named(path, tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        write_timeline(tmp_path / "missing", tmp_path / "timeline.json")
    with pytest.raises(ValueError, match="cannot be written"):
        write_timeline(path, tmp_path / "missing" / "timeline.json")
