"""Types of settings that are text: names, keys, addresses, origins and paths of requests."""

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr

CREDENTIALS = re.compile(r"://(?:([^:@/]*:).*|[^/]*)@")  # a wrong address may have a slash in its password
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")
DEFAULT_PORTS = (("http://", ":80"), ("https://", ":443"))  # which browsers leave out
NO_PATH = "none"


def split_commas(value: Any) -> Any:
    """`a,b` (environment, YAML) and `["a,b", "c"]` (repeated flags) as a list of names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    names: list[Any] = []
    for part in parts:
        names += [name.strip() for name in part.split(",")] if isinstance(part, str) else [part]
    if "" in names:  # an empty API key would let anyone in
        raise ValueError("holds an empty value")
    return names


def check_address(address: str) -> str:
    """Return the address of a server, to which paths are appended. Raises ValueError."""
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_address = False
    if not is_address or re.search(r"[\s?#]", address):
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, with or without a path")
    return address


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Return origins as browsers send them. Raises ValueError for one that would never match."""
    for origin in origins:
        if origin in ("*", "null"):
            continue
        scheme, separator, rest = origin.lower().partition("://")
        written = scheme + separator + rest.partition("/")[0]
        for start, port in DEFAULT_PORTS:
            if written.startswith(start):
                written = written.removesuffix(port)
        if not ORIGIN.fullmatch(written):
            raise ValueError(f"{origin} is no origin: write https://HOST, https://HOST:PORT, or * for any")
        if written != origin:
            raise ValueError(f"{origin} is not as browsers send it: write {written}")
    return origins


def check_request_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of requests. Raises ValueError for one that would never match."""
    for path in paths:
        written = "/" + path.partition("?")[0].strip("/")
        if path != written and paths != (NO_PATH,):
            raise ValueError(f"{path} is no path of a request: write {written}")
    return paths


def without_credentials(text: str) -> str:
    """Return a text in which addresses have no passwords: http://name:***@host."""
    return CREDENTIALS.sub(r"://\1***@", text)


Names = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(split_commas)]
Origins = Annotated[Names, AfterValidator(check_origins)]
RequestPaths = Annotated[Names, AfterValidator(check_request_paths)]
Address = Annotated[str, AfterValidator(check_address)]
