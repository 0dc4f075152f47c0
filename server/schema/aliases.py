"""Fields that other servers call by another name, and that mean the same."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest

OTHER_NAMES: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "stop_sequences": "stop",
    "stopping_strings": "stop",
    "no_stop_trim": "include_stop_str_in_output",
    "extra_key": "cache_salt",
}
# llama.cpp and Ollama write it for no limit.
NO_LIMIT = ("n_predict", "num_predict")


def rename(body: dict[str, Any], names: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """A body with the fields among `names` under their own, and the names it had for those.

    null is no value under any name. Raises InvalidRequest if there are two that differ.
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
    """JSON schemas of other names, for the `schema` of a model that takes them."""
    properties: dict[str, Any] = schema["properties"]
    return {
        name: properties[field] | {"description": f"another name of {field}"} for name, field in names.items()
    }
