"""Proxies of the environment: this machine is reached without them, and one that fails is a sentence."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from models.errors import FetchFailed
from models.hub import fetch_from_hub
from server.commands.bench.scrape import ServerInfo
from server.commands.chat_backends import ChatError, ServerBackend
from server.commands.client import ClientSettings
from server.healthcheck import address
from server.proxies import is_loopback, no_proxy_for_loopback
from tests.server.conftest import ROOT, LiveServer

NOWHERE = "http://127.0.0.1:9"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.fixture(params=["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A proxy for everything that nobody runs, of a kind that httpx may lack the package for."""
    for name in VARIABLES:
        monkeypatch.setenv(name, request.param)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    return str(request.param)


async def connect(url: str) -> str:
    backend = await ServerBackend.connect(ClientSettings(url=url))
    await backend.close()
    return backend.name


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_server_on_this_machine_is_asked_directly(live: LiveServer, proxy: str, ending: str) -> None:
    url = live.url + ending
    assert asyncio.run(connect(url)) == "fake-model"
    info = ServerInfo(ClientSettings(url=url))
    assert info.first_model() == "fake-model"
    assert info.snapshot().idle_seconds is not None
    assert ClientSettings(url=url).url == live.url


def test_a_socks_proxy_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    settings = ClientSettings(url="http://192.0.2.1:8000")
    with pytest.raises(ChatError, match=r"SOCKS proxy.*pip install socksio"):
        asyncio.run(ServerBackend.connect(settings))
    with pytest.raises(ValueError, match=r"SOCKS proxy.*pip install socksio"):
        ServerInfo(settings).first_model()


def test_a_socks_proxy_for_the_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(FetchFailed, match=r"SOCKS proxy.*socksio"):
        fetch_from_hub("owner/name", tmp_path, progress=False)


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.1.2.3", True),
        ("http://localhost:8000/v1", True),
        ("http://box.localhost", True),
        ("http://[::1]:8000", True),
        ("http://127.0.0.1.example.com", False),
        ("https://example.com", False),
        ("http://10.0.0.1", False),
        ("nonsense", False),
        ("http://[", False),
    ],
)
def test_addresses_of_this_machine(url: str, is_one: bool) -> None:
    assert is_loopback(url) == is_one


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"HTTP_PROXY": NOWHERE}, "localhost,127.0.0.1,::1"),
        ({"all_proxy": NOWHERE, "no_proxy": "a.example,localhost"}, "a.example,localhost,127.0.0.1,::1"),
        ({"https_proxy": NOWHERE, "no_proxy": "*"}, "*"),
        ({}, None),
        ({"HTTP_PROXY": ""}, None),
    ],
)
def test_other_libraries_are_told_of_this_machine(given: dict[str, str], expected: str | None) -> None:
    variables = dict(given)
    no_proxy_for_loopback(variables)
    assert variables.get("no_proxy") == expected


@pytest.mark.parametrize(
    ("flags", "variables", "url"),
    [
        ([], {}, "http://127.0.0.1:8000"),
        ([], {"MONOLOOP_PORT": "9001", "MONOLOOP_HOST": "0.0.0.0"}, "http://127.0.0.1:9001"),
        (["--port", "9002"], {"MONOLOOP_PORT": "9001"}, "http://127.0.0.1:9002"),
        (["--port=9002", "--host", "::"], {}, "http://[::1]:9002"),
        (["--config", "settings.yaml"], {}, "http://10.0.0.7:9003"),
        (["--port", "9002"], {"MONOLOOP_CONFIG": "settings.yaml"}, "http://10.0.0.7:9002"),
    ],
)
def test_the_health_check_follows_the_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variables: dict[str, str],
    url: str,
) -> None:
    (tmp_path / "settings.yaml").write_text("port: 9003\nhost: 10.0.0.7\n")
    monkeypatch.chdir(tmp_path)
    assert address(["tini", "--", "monoloop", "serve", *flags, ""], variables) == url
    assert flags or address((), variables) == url, "where the command line cannot be read"


def test_the_health_check_asks_without_a_proxy(start: Callable[..., LiveServer], proxy: str) -> None:
    server = start().ready()

    def exit_code() -> int:
        command = [sys.executable, "-m", "server.healthcheck"]
        environment = {**os.environ, "MONOLOOP_PORT": str(server.port)}
        return subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL).returncode

    port = server.port
    assert port
    assert exit_code() == 0
    server.process.kill()
    server.process.wait()
    assert exit_code() == 1


def test_the_image_uses_the_health_check() -> None:
    assert '"-m", "server.healthcheck"' in (ROOT / "Dockerfile").read_text()
