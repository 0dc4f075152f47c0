"""Aliases: the names that other servers have for a field."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from engine.errors import InvalidRequest
from server.schema.wire import WireRequest, wire_of

# llama.cpp and Ollama write it for no limit.
NO_LIMIT = ("n_predict", "num_predict")


@cache
def aliases_of(request: type[WireRequest]) -> Mapping[str, str]:
    """Return the aliases that a request takes, with the names of their fields."""
    return declared_aliases(request) if request.TAKES_ALIASES else {}


def declared_aliases(request: type[WireRequest]) -> dict[str, str]:
    """Return the aliases of a request's fields, taken or not."""
    return {alias: name for name, wire in wire_of(request).items() for alias in wire.aliases}


def rename(body: dict[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a body with its aliases (`names`) replaced by fields, and the alias it had for each of those.

    null is no value under any name. Raises InvalidRequest if a field has two values that differ.
    """
    renamed: dict[str, str] = {}
    for name in [name for name in names if name in body]:
        field = names[name]
        value, known = body[name], body.get(field)
        body = {other: body[other] for other in body if other != name}
        if value is None or (name in NO_LIMIT and value == -1):
            continue
        if known is None:
            body[field], renamed[field] = value, name
        elif known != value or isinstance(known, bool) != isinstance(value, bool):
            other_name = renamed.get(field, field)
            raise InvalidRequest(f"{name} is another name of {other_name}, and has another value.", name)
    return body, renamed


def described_names(schema: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON schemas of aliases, for the `schema` of a request that takes them."""
    properties: dict[str, Any] = schema["properties"]
    return {
        name: properties[field] | {"description": f"another name of {field}"} for name, field in names.items()
    }
