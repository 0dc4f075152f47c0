"""Finds the field that an unknown one probably means: `temprature`, `maxTokens`, `top-p`."""

import difflib
from functools import cache, lru_cache

from server.schema.aliases import aliases_of
from server.schema.wire import WireRequest

# A comparison with all fields takes 0.1 ms; a body may hold thousands of unknown names.
MAX_COMPARED = 16
MAX_LENGTH = 64
MIN_RATIO = 0.8


def meant_fields(request: type[WireRequest], unknown: list[str]) -> dict[str, str]:
    """Return the names among `unknown` that are close to a field of the request, with that field."""
    found = ((name, meant_field(request, name)) for name in unknown[:MAX_COMPARED] if len(name) <= MAX_LENGTH)
    return {name: field for name, field in found if field is not None}


@lru_cache(1024)
def meant_field(request: type[WireRequest], name: str) -> str | None:
    """Return the field, or the alias of one, whose name is closest to `name`; None if none is close."""
    known = plain_names(request)
    close = difflib.get_close_matches(plain(name), known, n=1, cutoff=MIN_RATIO)
    return known[close[0]] if close and name.isascii() and name.isprintable() else None


@cache
def plain_names(request: type[WireRequest]) -> dict[str, str]:
    """Return the names of a request's fields and aliases by their plain form."""
    return {plain(name): name for name in (*aliases_of(request), *request.model_fields)}


def plain(name: str) -> str:
    """Return a name without case and separators."""
    return name.lower().replace("_", "").replace("-", "")
