"""Finds the JSON types that the schema of a tool's argument allows, for formats that write values as text."""

from collections.abc import Iterable, Mapping
from typing import Any

# References to follow, and alternatives inside alternatives: clients nest a few.
MAX_DEPTH = 8
STRING = frozenset(("string",))
NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    list: "array",
    dict: "object",
}

Schema = Mapping[str, Any]


def argument_schemas(parameters: Schema) -> Mapping[str, Any]:
    """Return the schemas of the arguments, in the order of their declaration."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def argument_types(parameters: Schema, name: str) -> frozenset[str]:
    """Return the types of an argument; none if they are not known."""
    return types_of(argument_schemas(parameters).get(name), parameters)


def types_of(schema: Any, root: Schema, depth: int = MAX_DEPTH) -> frozenset[str]:
    """Return the types that a schema names; `root` has the definitions that it refers to."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    types = {name for name in _list(schema.get("type")) if isinstance(name, str)}
    if types:
        return frozenset(types)
    if "const" in schema:
        types.add(NAMES.get(type(schema["const"]), ""))
    types |= {NAMES.get(type(value), "") for value in _list(schema.get("enum"))}
    for kind in ("anyOf", "oneOf", "allOf"):
        for choice in _list(schema.get(kind)):
            types |= types_of(choice, root, depth - 1)
    return frozenset(types - {"", None})


def resolve(schema: Any, root: Schema) -> Any:
    """Return the schema that a reference into `root` means; None for one that leads nowhere."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        schema = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else () if value is None else (value,)
