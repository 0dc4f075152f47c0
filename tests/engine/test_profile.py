import gzip
import json
from pathlib import Path

import pytest
import torch

from engine.device.thread import DeviceThread
from engine.errors import InvalidRequest
from engine.profile import Profile


async def test_a_profile_has_the_ops_of_the_device_thread(tmp_path: Path) -> None:
    device = DeviceThread(run_ahead=1)
    profile, target = Profile(device), tmp_path / "new" / "profile.json.gz"
    await profile.start()
    await device.call(lambda: torch.ones(4) @ torch.ones(4))
    with pytest.raises(InvalidRequest, match="stop it first"):
        await profile.start()
    await profile.stop(target)
    names = {event.get("name") for event in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]}
    assert "aten::dot" in names, sorted(map(str, names))
    with pytest.raises(InvalidRequest, match="start one first"):
        await profile.stop(target)
    await device.stop()


async def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    device = DeviceThread(run_ahead=1)
    profile = Profile(device)
    await profile.start()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        await profile.stop(tmp_path / "file" / "profile.json")
    await profile.start()
    await profile.stop(tmp_path / "profile.json")
    await device.stop()


async def test_a_profile_that_is_not_stopped_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.profile.MAX_JOBS", 5)
    monkeypatch.setattr("engine.profile.POLL_SECONDS", 0.001)
    device = DeviceThread(run_ahead=1)
    profile, target = Profile(device), tmp_path / "profile.json"
    await profile.start()
    for _ in range(5):
        await device.call(lambda: torch.ones(4) @ torch.ones(4))
    assert profile._recording is not None
    await profile._recording
    await device.call(lambda: torch.ones(4).cumsum(0))
    await profile.stop(target)
    names = {event.get("name") for event in json.loads(target.read_bytes())["traceEvents"]}
    assert "aten::dot" in names and "aten::cumsum" not in names, sorted(map(str, names))
    await device.stop()
