"""Step listeners see every request and step in order, however many there are."""

import pytest

from engine import engine as room
from engine.config import EngineConfig
from engine.engine import open_listeners
from engine.errors import StepFailed
from engine.listener import StepListener
from engine.outputs import FinishReason
from tests.engine.toy_engine import request, toy_engine


class Notes(StepListener):
    """Writes down what it sees; events it does not override do nothing."""

    def __init__(self):
        self.events = []

    def started(self, model, config, token_budget, fingerprint):
        self.events.append(("started", model.name))

    def discard(self):
        self.events.append(("discarded",))

    def arrived(self, sequences, now):
        self.events.append(("arrived", [sequence.id for sequence in sequences]))

    def planned(self, plan, now):
        self.events.append(("planned", plan.step_id))

    def completed(self, output):
        self.events.append(("completed", output.step_id))

    def failed(self, plan, now):
        self.events.append(("failed", plan.step_id))

    def ended(self, sequence_id, reason, now):
        self.events.append(("ended", sequence_id, reason))

    def close(self):
        self.events.append(("closed",))

    def of(self, kind):
        return [event[1] for event in self.events if event[0] == kind]


class Silent(StepListener):
    """Overrides nothing."""


async def test_listeners_see_the_life_of_every_request(run_ahead):
    one, other = Notes(), Notes()
    async with toy_engine(run_ahead=run_ahead, listeners=[one, other, Silent()]) as engine:
        streams = engine.submit_group([request([1, 2, 3]), request([1, 2, 3], seed=8)])
        for stream in streams:
            await stream.collect()
    assert one.events == other.events
    assert one.events[0] == ("started", "toy") and one.events[-1] == ("closed",)
    [ids] = one.of("arrived")
    assert len(ids) == 2 and sorted(one.of("ended")) == sorted(ids)
    assert one.of("planned") == one.of("completed") == sorted(set(one.of("planned")))
    assert {event[2] for event in one.events if event[0] == "ended"} <= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


async def test_listeners_see_a_step_that_fails(run_ahead):
    def fail(plan):
        raise RuntimeError("no luck")

    notes = Notes()
    async with toy_engine(run_ahead=run_ahead, listeners=[notes], before_step=fail) as engine:
        with pytest.raises(StepFailed):
            await engine.submit(request([1, 2, 3])).collect()
    assert notes.of("failed") and set(notes.of("failed")) <= set(notes.of("planned"))
    assert not notes.of("completed")
    assert [event[2] for event in notes.events if event[0] == "ended"] == [FinishReason.ERROR]


def test_settings_open_the_listeners_of_the_list(monkeypatch, tmp_path):
    notes = Notes()
    monkeypatch.setattr(room, "LISTENERS", (*room.LISTENERS, lambda config: notes, lambda config: None))
    assert open_listeners(EngineConfig()) == [notes]
    recorder, second = open_listeners(EngineConfig(record=tmp_path / "record"))
    assert second is notes
    recorder.discard()


def test_a_listener_that_cannot_open_discards_those_before(monkeypatch, tmp_path):
    def refuse(config):
        raise ValueError("record: no")

    path, notes = tmp_path / "record", Notes()
    monkeypatch.setattr(room, "LISTENERS", (*room.LISTENERS, lambda config: notes, refuse))
    with pytest.raises(ValueError, match="record: no"):
        open_listeners(EngineConfig(record=path))
    assert notes.events == [("discarded",)]
    assert not path.exists()
