"""Which addresses are reached without the proxy of the environment: those of this machine."""

import ipaddress
from collections.abc import MutableMapping
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(url: str) -> bool:
    """Check that a URL's host is this machine. False for what is no URL."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def no_proxy_for_loopback(variables: MutableMapping[str, str]) -> None:
    """Where a proxy is set, add the names of this machine to those that are reached without it.

    A proxy looks for them on its own machine. pip and the hub's library read the variables.
    """
    if not any(name.lower().endswith("_proxy") and variables[name] for name in list(variables)):
        return
    for name in ("no_proxy", "NO_PROXY"):
        listed = [host for host in (variables.get(name, "") or "").split(",") if host]
        if "*" not in listed:
            variables[name] = ",".join([*listed, *(host for host in LOOPBACK if host not in listed)])
