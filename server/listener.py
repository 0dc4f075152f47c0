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
    certfile, keyfile = config.ssl_certfile, config.ssl_keyfile or config.ssl_certfile
    try:
        ssl.create_default_context(cafile=certfile)
    except OSError as error:
        raise SettingsError(
            f"--ssl-certfile: {certfile} {_reason(error, 'holds no certificate in PEM format')}"
        ) from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2", "http/1.1"])
    has_password = False

    def password() -> str:
        nonlocal has_password
        has_password = True
        return ""  # with a password of its own openssl asks at no terminal

    try:
        context.load_cert_chain(certfile, keyfile, password)
    except (OSError, ValueError) as error:
        if has_password:
            reason = "has a key with a password; write it without one (openssl pkey)"
        elif getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            reason = f"has a key that is not that of the certificate in {certfile}"
        else:
            reason = _reason(error, "holds no private key in PEM format")
        setting = "--ssl-keyfile" if config.ssl_keyfile else "--ssl-certfile"
        raise SettingsError(f"{setting}: {keyfile} {reason}") from None
    return context


def _reason(error: OSError | ValueError, wrong_content: str) -> str:
    """Return what is wrong with a file of TLS, which cannot be read or has the wrong content."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return f"cannot be read ({error.strerror})"
    return wrong_content


def certificate_problem(context: ssl.SSLContext, config: ServerConfig) -> str | None:
    """Return why clients will not take the certificate, such as its age; None if they may.

    A client that trusts the certificate itself connects to it here, in memory.
    """
    trusting = ssl.create_default_context(cafile=config.ssl_certfile)
    trusting.check_hostname = False
    trusting.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN  # without what only Python asks of it
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLCertVerificationError as error:
            return f"--ssl-certfile: clients will refuse {config.ssl_certfile}: {error.verify_message}"
        except ssl.SSLError:  # mostly that it waits for the other
            pass
    return None


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Return the address a person can use; one that means "all" is reached over loopback."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = config.host, listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"
