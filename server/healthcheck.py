"""`python -m server.healthcheck`: the image's health check, with exit code 0 if the server is ready.

It asks the address that the server was configured with, never through a proxy, and imports next to nothing,
since it runs every few seconds.
"""

import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import yaml

TIMEOUT_SECONDS = 2
COMMAND_LINE = Path("/proc/1/cmdline")  # of the container's first process, tini or monoloop


def main() -> int:
    """Ask /ready; return 0 if the answer is 200 and 1 if not."""
    try:
        command = COMMAND_LINE.read_text("utf-8", "replace").split("\0")
    except OSError:
        command = []
    try:
        ask(address(command, os.environ))
    except (URLError, OSError, ValueError, http.client.HTTPException) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def ask(url: str) -> None:
    """Ask /ready of a server. Raises OSError, URLError or HTTPException unless the answer is 200."""
    if not url.startswith("unix:"):
        # A certificate is for the server's name, which is not the address that is asked here.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=tls))
        opener.open(f"{url}/ready", timeout=TIMEOUT_SECONDS)
        return
    connection = http.client.HTTPConnection("localhost")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection.sock:
        connection.sock.settimeout(TIMEOUT_SECONDS)
        connection.sock.connect(url.removeprefix("unix:"))
        connection.request("GET", "/ready")
        if (status := connection.getresponse().status) != 200:
            raise OSError(f"{url} answers {status}")


def address(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the URL of a server that was started with these flags, variables and YAML file.

    That of a unix socket is `unix:` and its path.
    """
    file = _flag(command, "--config") or variables.get("MONOLOOP_CONFIG")
    values = yaml.safe_load(Path(file).read_text("utf-8")) if file else None
    given = values if isinstance(values, dict) else {}
    host, port, path, certificate = (
        str(
            _flag(command, f"--{name.replace('_', '-')}")
            or variables.get(f"MONOLOOP_{name.upper()}")
            or given.get(name)
            or ""
        )
        for name in ("host", "port", "uds", "ssl_certfile")
    )
    if path:
        return f"unix:{path}"
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    port = port if port.isdecimal() else "8000"
    scheme = "https" if certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _flag(command: Sequence[str], name: str) -> str | None:
    """Return the value of the last flag of that name, written with a space or with `=`."""
    found = None
    for word, following in pairwise([*command, ""]):
        if word == name:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


if __name__ == "__main__":
    sys.exit(main())
