"""monoloop replay and monoloop timeline: what they print, and their exit codes.

Covers server/commands/replay.py and server/commands/timeline.py.
"""

import asyncio
import json

import pytest

from engine import Engine
from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from server import cli
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def recorded(checkpoint, tmp_path_factory):
    """A record of two requests."""
    path = tmp_path_factory.mktemp("records") / "record"

    async def run() -> None:
        config = EngineConfig(
            model=str(checkpoint), device="cpu", dtype="float32", kv_tokens=256, record=path
        )
        engine = await Engine.start(config)
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        streams = [engine.submit(Request(f"r-{index}", (5, 6, 7 + index), sampling)) for index in range(2)]
        await asyncio.gather(*(stream.collect() for stream in streams))
        await engine.stop()

    asyncio.run(run())
    return path


def test_equal(recorded, capsys):
    assert cli.main(["replay", str(recorded)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("equal: ") and told.out.endswith("12 tokens of 2 requests\n")
    assert "not whole" not in told.err


def test_different(recorded, tmp_path, capsys):
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    changed = [line for line in lines if "tokens" in line][2]
    old = changed["sampled"][0]
    changed["sampled"][0] = (old + 1) % 50
    path = tmp_path / "changed"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert cli.main(["replay", str(path)]) == 1
    told = capsys.readouterr()
    assert "different: 1 of 2 requests" in told.out
    where = f"step {changed['tokens']}: output token 2 of request r-0"
    assert f"{where} is [{old}], recorded was [{(old + 1) % 50}]" in told.out
    assert "the record is not whole: it was not closed" in told.err


def test_a_record_without_a_step_is_not_equal_to_anything(recorded, tmp_path, capsys):
    path = tmp_path / "cut"
    path.write_text(recorded.read_text().split("\n")[0] + "\n{")
    assert cli.main(["replay", str(path)]) == 1
    told = capsys.readouterr()
    assert "no step to compare" in told.err and not told.out


def test_bad_files(recorded, checkpoint, tmp_path, capsys):
    other = write_checkpoint(tmp_path / "other", seed=1)
    (tmp_path / "text").write_text("hello\n")
    for arguments, message in (
        (["replay", str(tmp_path / "text")], "is no record"),
        (["replay", str(tmp_path / "missing")], "cannot be read"),
        (["replay", str(recorded), "--model", str(other)], "recorded with another model"),
        (["replay", str(recorded), "--model", str(tmp_path / "missing")], "there is no folder or .gguf file"),
        (["timeline", str(tmp_path / "text"), str(tmp_path / "out")], "is no record"),
        (["timeline", str(recorded), str(tmp_path / "no" / "out")], "cannot be written"),
    ):
        assert cli.main(arguments) == cli.USAGE
        assert message in capsys.readouterr().err


def test_timeline(recorded, tmp_path):
    target = tmp_path / "timeline.json"
    assert cli.main(["timeline", str(recorded), str(target)]) == 0
    assert {event["ph"] for event in json.loads(target.read_text())} == {"M", "X", "b", "e"}


def test_a_timeline_replaces_no_file(recorded, tmp_path, capsys):
    target = tmp_path / "timeline.json"
    target.write_text("mine")
    before = recorded.read_bytes()
    for path in (target, recorded):
        assert cli.main(["timeline", str(recorded), str(path)]) == cli.USAGE
        assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert recorded.read_bytes() == before
    assert cli.main(["timeline", str(recorded), "/dev/null"]) == 0, "no file of its own"
