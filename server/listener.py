"""Where the server listens: an address, or a unix socket, with TLS or without."""

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from server.config import ServerConfig
from server.flags import SettingsError

BACKLOG = 2048
UNIX_MODE = 0o660  # its user and group, such as that of a proxy, may connect


def listen(config: ServerConfig) -> socket.socket:
    """Return a socket that listens where the settings say. Raises SettingsError."""
    return bind_unix(config.uds) if config.uds else bind(config.host, config.port)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; on `::` also for IPv4. Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host name looks like this"
        raise SettingsError(f"--host {host}: is no address of this machine ({reason})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the system's default
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise SettingsError(f"--host {host}: is no address of this machine ({error.strerror})") from None
        raise SettingsError(f"--port {port}: cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Return a unix socket that listens at `path`, and replaces a stale one. Raises SettingsError."""
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(UNIX_MODE)  # before anyone can connect
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(f"--uds {path}: cannot listen there ({error.strerror or error})") from None
    return listener


def remove_stale(path: Path) -> None:
    """Remove the socket of a server that was killed. Raises SettingsError for what is anything else."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # there is none, or none can be there
        return
    if not stat.S_ISSOCK(mode):
        raise SettingsError(
            f"--uds {path}: there is a file that is no socket; remove it, or give another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with suppress(OSError):
                path.unlink()
            return
        except OSError:  # it belongs to someone else, or its listen queue is full
            pass
    raise SettingsError(f"--uds {path}: another process listens there")


def remove(listener: socket.socket) -> None:
    """Remove the file of a unix socket that has not been closed."""
    if listener.fileno() != -1 and listener.family == socket.AF_UNIX:
        with suppress(OSError):
            os.unlink(listener.getsockname())


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS of the settings, which offers HTTP/2; None if there is none. Raises SettingsError."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None:
            raise SettingsError("--ssl-keyfile: needs --ssl-certfile, the certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        # With a password of its own openssl asks at no terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(str(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file)
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else error
        raise SettingsError(
            f"--ssl-certfile: {files} cannot be used ({reason}); a certificate chain and its key, without "
            "a password, are needed in PEM format"
        ) from None
    return context


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return the address a person can use; one that means "all" is reached over loopback."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = config.host, listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"
