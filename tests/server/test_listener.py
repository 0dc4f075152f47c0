"""Addresses, unix sockets and TLS: what listens, what reaches it, and what is left behind."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import healthcheck
from server.commands.bench.client import Client
from server.commands.bench.workload import Job
from server.commands.client import ClientSettings
from server.config import ServerConfig
from server.flags import SettingsError
from server.listener import bind, bind_unix, certificate_problem, remove, tls_context, url_of
from tests.server.conftest import ROOT, LiveServer

Start = Callable[..., LiveServer]
CHAT = {"messages": [{"role": "user", "content": "tokens=3 delay=0.001"}], "stream": True}
TEXT = "".join(f"t{number} " for number in range(3))
has_ipv6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
LOOPS = pytest.mark.parametrize("loop", ["--uvloop", "--no-uvloop"])


def test_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(SettingsError, match=r"--host no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(SettingsError, match=r"--host 192\.0\.2\.1: is no address"):
        bind("192.0.2.1", 0)
    with pytest.raises(SettingsError, match=r"--host a\.\.b: is no address"):
        bind("a..b", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("0.0.0.0", "http://127.0.0.1:"),
        ("localhost", "http://localhost:"),
        pytest.param("::", "http://[::1]:", marks=has_ipv6),
        pytest.param("::1", "http://[::1]:", marks=has_ipv6),
    ],
)
def test_url_is_one_a_person_can_use(host: str, url: str) -> None:
    with bind(host, 0) as listener:
        assert url_of(listener, ServerConfig(host=host)) == url + str(listener.getsockname()[1])


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.text.endswith("data: [DONE]\n\n")
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def health_check(**variables: str) -> int:
    command = [sys.executable, "-m", "server.healthcheck"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL).returncode


def bench_once(url: str) -> None:
    body = {"prompt": "tokens=3 delay=0.001", "stream": True, "stream_options": {"include_usage": True}}
    result = asyncio.run(Client(url, timeout_seconds=20).stream(Job(1, 3, 0.0, body)))
    assert result.error is None
    assert result.output_tokens == 3


# IPv6


@has_ipv6
def test_all_addresses_are_those_of_both_protocols(start: Start) -> None:
    live = start("--host", "::").ready()
    assert live.url.startswith("http://[::1]:")
    assert live.get("/health").status_code == 200
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert peer.recv(1000).startswith(b"HTTP/1.1 200")
    assert health_check(MONOLOOP_HOST="::", MONOLOOP_PORT=str(live.port)) == 0
    bench_once(live.url)


# Unix sockets


@LOOPS
def test_a_unix_socket_is_served_and_removed(start: Start, tmp_path: Path, loop: str) -> None:
    path = tmp_path / "m.sock"
    live = start("--uds", str(path), loop)
    live.wait_for("is ready after .*: unix:")
    live.wait_for(f"curl -N --unix-socket {path} http://localhost/v1/chat/completions")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    settings = ClientSettings(url=f"unix:{path}")
    with httpx.Client(timeout=20, **settings.http_options(httpx.HTTPTransport)) as client:
        assert text_of(client.post("/v1/chat/completions", json=CHAT)) == TEXT
    assert health_check(MONOLOOP_UDS=str(path)) == 0
    bench_once(settings.url)
    live.send(signal.SIGTERM)
    assert live.exit_code() == 0
    assert not path.exists()
    assert health_check(MONOLOOP_UDS=str(path)) == 1
    assert "Traceback" not in live.log, live.log


def test_a_unix_socket_is_removed_at_an_end_at_once(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    live = start("--uds", str(path), FAKE_LOADED=str(tmp_path / "never"))
    live.wait_for("answers 503")
    assert path.exists()
    live.send(signal.SIGTERM)
    assert live.exit_code() == 0
    assert not path.exists()


def test_a_socket_that_is_left_over_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    bind_unix(path).close()
    assert path.exists()
    with bind_unix(path) as listener:
        remove(listener)
    assert not path.exists()
    with bind_unix(path) as listener:
        pass
    remove(listener)  # of a listener that is closed
    assert path.exists()


def test_what_is_no_left_over_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    path.write_text("mine")
    with pytest.raises(SettingsError, match=r"m\.sock: there is a file that is no socket"):
        bind_unix(path)
    assert path.read_text() == "mine"
    path.unlink()
    with bind_unix(path), pytest.raises(SettingsError, match=r"m\.sock: another process listens there"):
        bind_unix(path)
    assert path.exists()
    with pytest.raises(SettingsError, match=r"--uds .*: cannot listen there"):
        bind_unix(tmp_path / "none" / "m.sock")
    with pytest.raises(SettingsError, match=r"--uds .*: cannot listen there"):
        bind_unix(tmp_path / ("x" * 200))


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that only itself vouches for, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *names, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True
    )
    return files


def serve_tls(start: Start, certificate: tuple[Path, Path], *flags: str) -> LiveServer:
    files = "--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1])
    return start(*files, *flags).ready()


def trusting(certificate: tuple[Path, Path], **options: Any) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(certificate[0]))
    return httpx.Client(verify=context, timeout=20, trust_env=False, **options)


@LOOPS
def test_https_in_both_versions_of_http(start: Start, certificate: tuple[Path, Path], loop: str) -> None:
    live = serve_tls(start, certificate, loop)
    assert live.url.startswith("https://127.0.0.1:")
    for version, options in (("HTTP/2", {"http2": True}), ("HTTP/1.1", {})):
        with trusting(certificate, **options) as client:
            answer = client.post(f"{live.url}/v1/chat/completions", json=CHAT)
            assert answer.http_version == version
            assert text_of(answer) == TEXT
            body = {"messages": [{"role": "user", "content": "x" * 1_000_000}]}
            assert client.post(f"{live.url}/tokenize", json=body).status_code in (200, 400)
    variables = {"MONOLOOP_PORT": str(live.port), "MONOLOOP_SSL_CERTFILE": str(certificate[0])}
    assert health_check(**variables) == 0
    with httpx.Client(**ClientSettings(url=live.url).http_options(httpx.HTTPTransport)) as client:
        assert client.get("/v1/models").status_code == 200
    bench_once(live.url)
    live.send(signal.SIGTERM)
    assert live.exit_code() == 0
    assert "Traceback" not in live.log, live.log


@LOOPS
def test_peers_without_tls_harm_nobody(start: Start, certificate: tuple[Path, Path], loop: str) -> None:
    live = serve_tls(start, certificate, loop)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = peer.recv(1000)
        assert b"200" not in answer
    any_name = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    any_name.check_hostname, any_name.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", live.port), timeout=10),  # says nothing
        socket.create_connection(("127.0.0.1", live.port), timeout=10) as peer,
        any_name.wrap_socket(peer) as tls,
    ):
        tls.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert tls.recv(1000).startswith(b"HTTP/1.1 200")
    live.send(signal.SIGTERM)
    assert live.exit_code() == 0
    assert "Traceback" not in live.log, live.log


@LOOPS
@pytest.mark.parametrize("leaves", [True, False])
def test_peers_of_tls_that_do_not_read_or_leave_are_noticed(
    start: Start, certificate: tuple[Path, Path], loop: str, leaves: bool
) -> None:
    live = serve_tls(start, certificate, loop, "--send-timeout-seconds", "1", "--ping-seconds", "0.05")
    content = "hang" if leaves else "tokens=4000 size=5000"
    request = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 4000}
    body = json.dumps(request).encode()
    any_name = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    any_name.check_hostname, any_name.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with any_name.wrap_socket(peer) as tls:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            tls.sendall(head % len(body) + body)
            if leaves:
                assert tls.recv(1000).startswith(b"HTTP/1.1 200")
            else:
                live.wait_for("a client stopped reading")
    live.wait_for("POST /v1/chat/completions ")
    live.wait_until_idle()


def test_wrong_files_are_named(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    assert tls_context(ServerConfig()) is None
    assert tls_context(ServerConfig(ssl_certfile=cert, ssl_keyfile=key)) is not None
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    assert tls_context(ServerConfig(ssl_certfile=both)) is not None
    with pytest.raises(SettingsError, match="--ssl-keyfile: needs --ssl-certfile"):
        tls_context(ServerConfig(ssl_keyfile=key))
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    none = tmp_path / "none.pem"
    other = tmp_path / "other.pem"
    command = ["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", other]
    subprocess.run(command, check=True, capture_output=True)
    for files, message in (
        ((none, key), "--ssl-certfile: .*none.pem cannot be read"),
        ((key, cert), "--ssl-certfile: .*key.pem holds no certificate in PEM format"),
        ((cert, none), "--ssl-keyfile: .*none.pem cannot be read"),
        ((cert, cert), "--ssl-keyfile: .*cert.pem holds no private key"),
        ((cert, None), "--ssl-certfile: .*cert.pem holds no private key"),
        (
            (cert, other),
            "--ssl-keyfile: .*other.pem has a key that is not that of the certificate in .*cert.pem",
        ),
        ((cert, locked), "--ssl-keyfile: .*locked.pem has a key with a password"),
    ):
        with pytest.raises(SettingsError, match=message) as error:
            tls_context(ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
        assert "\n" not in str(error.value)


def test_a_certificate_that_clients_refuse(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    expired, request, key = tmp_path / "expired.pem", tmp_path / "request.pem", certificate[1]
    assert warning_about(*certificate) is None
    for command in (
        ["req", "-new", "-key", key, "-subj", "/CN=localhost", "-out", request],
        ["x509", "-req", "-in", request, "-signkey", key, "-days", "-1", "-out", expired],
    ):
        if subprocess.run(["openssl", *command], check=False, capture_output=True).returncode:
            pytest.skip("this openssl makes no certificate that ends in the past")
    assert warning_about(expired, key) == (
        f"--ssl-certfile: clients will refuse {expired}: certificate has expired"
    )


def warning_about(certfile: Path, keyfile: Path) -> str | None:
    """Return what is said about a certificate that can be used."""
    config = ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile)
    context = tls_context(config)
    assert context is not None
    return certificate_problem(context, config)


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({"MONOLOOP_UDS": "/run/m.sock", "MONOLOOP_PORT": "9"}, "unix:/run/m.sock"),
        ({"MONOLOOP_SSL_CERTFILE": "c.pem", "MONOLOOP_HOST": "::"}, "https://[::1]:8000"),
        ({"MONOLOOP_SSL_CERTFILE": "c.pem"}, "https://127.0.0.1:8000"),
    ],
)
def test_clients_and_health_check_follow_the_settings(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ClientSettings().url == url
    flags = [part for name, value in variables.items() for part in (flag_of(name), value)]
    assert healthcheck.address(flags, {}) == url


def flag_of(variable: str) -> str:
    return "--" + variable.removeprefix("MONOLOOP_").lower().replace("_", "-")
