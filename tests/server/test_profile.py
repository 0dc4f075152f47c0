import os
from pathlib import Path

import httpx
import pytest

from engine.device.thread import DeviceThread
from engine.profile import Profile
from server.app import build_app
from server.config import ServerConfig
from server.metrics import Metrics
from tests.server.fake_engine import FakeEngine


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiles_are_off_by_default(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path)
    assert response.status_code == 400
    assert "--profile-dir" in response.json()["error"]["message"]


async def test_a_profile_is_written_to_the_folder(engine: FakeEngine, tmp_path: Path) -> None:
    device = DeviceThread(run_ahead=1)
    engine.profile = Profile(device)
    app = build_app(None, ServerConfig(profile_dir=tmp_path, api_key=("k",)), Metrics())  # type: ignore[arg-type]
    app.state.context.attach(engine)
    key = {"Authorization": "Bearer k"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post("/start_profile")).status_code == 401
        page = await client.post("/start_profile", headers={**key, "Origin": "http://page"})
        assert page.status_code == 400 and "Web pages" in page.text
        early = await client.post("/stop_profile", headers=key)
        assert early.status_code == 400
        assert "start one first" in early.text
        assert (await client.post("/start_profile", headers=key)).status_code == 200
        assert (await client.post("/start_profile", headers=key)).status_code == 400
        response = await client.post("/stop_profile", headers=key)
    assert response.status_code == 200
    written = Path(response.json()["path"])
    assert written.parent == tmp_path
    assert os.listdir(tmp_path) == [written.name]
    await device.stop()
