"""Records keep every plan, and a replay computes equal tokens or names the first difference."""

import asyncio
import json
import logging
import stat
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from engine import Engine
from engine.config import EngineConfig
from engine.errors import ModelError, StepFailed
from engine.outputs import RowReadout, SlotInit, StepPlan
from engine.readouts import PooledHidden, PromptLogprobs
from engine.record import writer
from engine.record.reader import Completed, Ended, Planned, Record
from engine.record.replay import compare, replay
from engine.record.writer import Recorder
from engine.request import Grammar, Request, SamplingParams
from tests.engine.toy import VOCAB_SIZE, ToyRunner
from tests.engine.toy_engine import toy_engine
from tests.tiny_checkpoint import write_checkpoint

COUNTING = tuple(range(10, 40))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def request(prompt, max_tokens=20, *, name="r", **sampling) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling))


async def all_kinds_of_traffic(engine: Engine) -> None:
    """Chunks, samples of one prompt, an embedding, hits, aborts, and more than the pool holds."""
    group = [request(COUNTING[:21], seed=seed) for seed in range(3)]
    streams = [*engine.submit_group(group), engine.submit(request(COUNTING, temperature=0.0))]
    streams.append(
        engine.submit(Request("e", COUNTING, SamplingParams(max_tokens=0), readouts=(PooledHidden("mean"),)))
    )
    streams.append(engine.submit(replace(request(COUNTING, 1), readouts=(PromptLogprobs(2),))))
    aborted = engine.submit(request(COUNTING[5:], 60, name="aborted", logit_bias=((3, 1.5),)))
    reader = asyncio.create_task(aborted.collect())
    await asyncio.gather(*(stream.collect() for stream in streams))
    aborted.abort()
    await asyncio.gather(reader, return_exceptions=True)  # on a busy machine it may have ended before
    later = [request((*COUNTING[:17], index), 30, presence_penalty=0.5) for index in range(6)]
    await asyncio.gather(*(engine.submit(one).collect() for one in later))


async def test_a_replay_of_the_real_model_computes_equal_tokens(checkpoint, tmp_path, run_ahead):
    path = tmp_path / "record"
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        page_size=16,
        kv_tokens=128,
        max_num_seqs=4,
        token_budget=24,
        run_ahead=run_ahead,
        overcommit=1.0,
        record=path,
    )
    engine = await Engine.start(config)
    try:
        await all_kinds_of_traffic(engine)
        grammar = Grammar("regex", "([a-z]{3} ){2,4}")
        strict = [request(COUNTING[: 3 + index], grammar=grammar, seed=index) for index in range(2)]
        await asyncio.gather(*(engine.submit(one).collect() for one in await engine.prepare(strict)))
        assert engine.stats().constrained_steps_total > 0
        assert engine.stats().preemptions_total > 0, "the pool is too large to show anything"
        assert engine.stats().cached_prompt_tokens_total > 0
        num_steps = engine.stats().steps_total
    finally:
        await engine.stop()
    plans = [event.plan for event in Record(path).events() if isinstance(event, Planned)]
    assert any(plan.page_copies for plan in plans)
    assert any(init.output_token_ids for plan in plans for init in plan.inits.values()), "resumed"
    found = replay(path)
    assert (found.first, found.num_different, found.ending) == (None, 0, None)
    assert (found.num_steps, found.num_sequences) == (num_steps, 15)

    other = write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="recorded with another model"):
        replay(path, model=str(other))
    moved = tmp_path / "moved"
    checkpoint.rename(moved)
    try:
        with pytest.raises(ModelError):
            replay(path)
        assert replay(path, model=str(moved)).first is None
    finally:
        moved.rename(checkpoint)


async def test_plans_are_read_back_unchanged(tmp_path, run_ahead):
    launched: list[StepPlan] = []

    def before_step(plan: StepPlan) -> None:
        launched.append(plan)
        if plan.step_id == 9:
            raise StepFailed("no more memory")

    path = tmp_path / "record"
    toy = {"num_pages": 24, "max_num_seqs": 4, "token_budget": 10, "overcommit": 1.0}
    async with toy_engine(record=path, run_ahead=run_ahead, before_step=before_step, **toy) as engine:
        first = [engine.submit(request(COUNTING[index:], 12)) for index in range(3)]
        await asyncio.gather(*(stream.collect() for stream in first), return_exceptions=True)
        await all_kinds_of_traffic(engine)
        assert engine.stats().preemptions_total > 0
    events = list(Record(path).events())
    assert [event.plan for event in events if isinstance(event, Planned)] == launched
    ends = [event.sequence_id for event in events if isinstance(event, Ended)]
    assert sorted(ends) == list(range(16)), "every request ends once"
    assert compare(Record(path), ToyRunner(24, 4)).first is None


@pytest.fixture
async def path(tmp_path) -> Path:
    """A short record of the toy model."""
    path = tmp_path / "record"
    async with toy_engine(record=path) as engine:
        names = ("one", "two")
        streams = [engine.submit(request(COUNTING[:5], 8, name=name, seed=7)) for name in names]
        await asyncio.gather(*(stream.collect() for stream in streams))
    return path


def change_line(path: Path, key: str, number: int, change) -> None:
    """Change the `number`th line that has `key`."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change([line for line in lines if key in line][number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_first_token_that_differs_is_named(path):
    tokens = [event for event in Record(path).events() if isinstance(event, Completed)]
    other = (tokens[3].tokens[1][0] + 1) % VOCAB_SIZE
    change_line(path, "tokens", 3, lambda line: line["sampled"].__setitem__(1, other))
    found = compare(Record(path), ToyRunner(64, 4))
    assert found.num_different == 1
    first = found.first
    assert (first.step_id, first.request_id, first.token_index) == (tokens[3].step_id, "two", 3)
    assert (first.recorded, first.computed) == ((other,), tokens[3].tokens[1])


@pytest.mark.parametrize("num_bytes", [1, 10])
def test_a_truncated_record_is_replayed_to_its_end(path, num_bytes):
    whole = compare(Record(path), ToyRunner(64, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-6]) + lines[-6][:-num_bytes])
    found = compare(Record(path), ToyRunner(64, 4))
    assert found.first is None
    assert 0 < found.num_steps < whole.num_steps
    assert found.ending == f"it ends in the middle of line {len(lines) - 5}"


def test_a_record_of_a_killed_process_was_not_closed(path):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert compare(Record(path), ToyRunner(64, 4)).ending == "it was not closed"


def test_files_that_are_no_records_are_refused(path, tmp_path):
    for text, message in (
        (b"", "is no record"),
        (b"\x00\xff\n", "is no record"),
        (b"[1]\n", "is no record"),
        (b'{"format": "something else"}\n', "is no record"),
        (b'{"format": "monoloop-record", "version": 99}\n', "version 99; this program reads 2"),
        (b'{"format": "monoloop-record", "version": 2}\n', "broken first line"),
    ):
        other = tmp_path / "other"
        other.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            Record(other)
    with pytest.raises(ValueError, match="cannot be read"):
        Record(tmp_path / "missing")


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("plan", lambda line: line.update(rows=[[99, 0, 0, 1, 1, [], True, [], []]])),
        ("plan", lambda line: line.pop("at")),
        ("tokens", lambda line: line.update(tokens=12345)),
        ("tokens", lambda line: line.update(sampled=[])),
        ("arrive", lambda line: line.update(sampling={"max_tokens": "many"})),
        ("arrive", lambda line: line.update(prompt_of=77) or line.pop("prompt")),
        ("end", lambda line: line.update(reason="boredom")),
        ("arrive", lambda line: line.update(prompt=[10**9])),
        ("arrive", lambda line: line.update(prompt=[-1])),
        ("plan", lambda line: line["rows"][0].__setitem__(1, 999)),
        ("plan", lambda line: line["rows"][0].__setitem__(2, -1)),
        ("plan", lambda line: line["rows"][0].__setitem__(3, 500)),
        ("plan", lambda line: line["rows"][0].__setitem__(5, [])),
        ("plan", lambda line: line["rows"][0].__setitem__(5, [[10**6]])),
        ("plan", lambda line: line["rows"][0].__setitem__(4, 500)),
        ("plan", lambda line: line["rows"][0].__setitem__(7, [10**7])),
        ("plan", lambda line: line["rows"][0].__setitem__(8, [["Wishes", {}, 0, 1, True]])),
        (
            "plan",
            lambda line: line["rows"][0].__setitem__(8, [["PooledHidden", {"pooling": "?"}, 0, 1, True]]),
        ),
        (
            "plan",
            lambda line: line["rows"][0].__setitem__(8, [["PromptLogprobs", {"num_top": 1}, 9, 99, True]]),
        ),
        ("plan", lambda line: line.update(copies=[[10**7, 1]])),
    ],
)
def test_an_invalid_line_is_named(path, key, change):
    change_line(path, key, 0, change)
    with pytest.raises(ValueError, match=r"line \d+: makes no sense"):
        compare(Record(path), ToyRunner(64, 4))


def test_records_contain_every_field_of_a_plan():
    """Whoever adds a field adds it to the record, too, or replays would compute something else."""
    columns = ("sequence_ids", "slots", "starts", "query_lens", "num_logits")
    by_row = ("token_ids", "new_pages", "inits", "readouts")
    assert StepPlan._fields == ("step_id", *columns, *by_row, "page_copies")
    made_again = "constraints"  # out of the sampling parameters
    assert SlotInit._fields == ("sampling", "seed", "prompt_token_ids", "output_token_ids", made_again)
    assert RowReadout._fields == ("readout", "start", "num_tokens", "next_token_ids", "is_last")


# The writer


async def test_prompts_are_private_and_nothing_is_overwritten(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    size = path.stat().st_size
    with pytest.raises(ValueError, match=r"^record: .* exists already"):
        await Engine.start(EngineConfig(model="m", record=path))
    assert path.stat().st_size == size
    with pytest.raises(ValueError, match=r"^record: .* cannot be written"):
        await Engine.start(EngineConfig(model="m", record=path / "below a file"))


async def test_an_engine_that_does_not_start_leaves_no_record(tmp_path):
    with pytest.raises(ModelError):
        await Engine.start(EngineConfig(model="no such model", record=tmp_path / "record"))
    assert not list(tmp_path.iterdir())


class Disk:
    """A file that waits before it writes, or fails."""

    def __init__(self, file, error: OSError | None = None) -> None:
        self.file = file
        self.error = error
        self.may_write = threading.Event()

    def write(self, data: bytes) -> None:
        if data.startswith(b'{"format"'):
            return
        self.may_write.wait()
        if self.error is not None:
            raise self.error

    def flush(self) -> None: ...

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device")])
async def test_a_bad_disk_ends_the_record_and_nothing_else(tmp_path, monkeypatch, caplog, error):
    """However slow it is, a bounded amount waits for it; the engine goes on."""
    monkeypatch.setattr(writer, "MAX_PENDING", 200)
    disks = deque()
    opened = Recorder.open

    def open_slowly(path: Path) -> Recorder:
        recorder = opened(path)
        recorder._file = Disk(recorder._file, error)
        disks.append(recorder._file)
        return recorder

    monkeypatch.setattr(Recorder, "open", open_slowly)
    with caplog.at_level(logging.ERROR, "monoloop.engine"):
        async with toy_engine(record=tmp_path / "record") as engine:
            streams = [engine.submit(request(COUNTING[:index], 50)) for index in range(1, 20)]
            if error is not None:
                disks[0].may_write.set()
                engine._listeners[0]._thread.join(10)  # the fault comes before more waits than may
            await asyncio.gather(*(stream.collect() for stream in streams))
            assert engine._listeners[0]._events.qsize() < 200
            disks[0].may_write.set()
    [told] = [record.message for record in caplog.records if "ends here" in record.message]
    assert ("slower than the engine" in told) == (error is None)
