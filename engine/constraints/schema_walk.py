"""Visits the schemas inside a JSON schema, and follows its references."""

from collections.abc import Callable, Iterator
from typing import Any

from engine.constraints.schema_cost import target

# Keywords with schemas by name, and keywords with values that are no schemas.
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("const", "enum", "default", "examples"))
OTHER_VALUES = VALUES | {"dependentRequired", "discriminator", "required", "x-guidance"}
# Keywords that say nothing about a value.
ANNOTATIONS = frozenset(
    (
        *("$anchor", "$comment", "$id", "$schema", "default", "deprecated", "description", "examples"),
        *("readOnly", "title", "writeOnly"),
    )
)
MAX_REFERENCES = 32


def is_any(schema: Any) -> bool:
    """Return True if every value matches a schema."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS)


def inner_schemas(
    schema: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield each object in a schema that is a schema, itself included, with the path to it."""
    stack: list[tuple[tuple[str, ...], Any]] = [(path, schema)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, list):
            stack += (((*path, str(number)), part) for number, part in enumerate(item))
        elif isinstance(item, dict):
            yield path, item
            for key, value in item.items():
                if key in NAMED and isinstance(value, dict):
                    stack += (((*path, key, name), part) for name, part in value.items())
                elif key not in OTHER_VALUES:
                    stack.append(((*path, key), value))


def rewritten(node: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a copy of a schema after `change` to each schema in it, the inner ones first."""
    if isinstance(node, list):
        return [rewritten(item, change) for item in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: rewritten(item, change) for name, item in value.items()}
        else:
            found[key] = value if key in OTHER_VALUES else rewritten(value, change)
    return change(found)


def resolved(root: dict[str, Any], schema: Any) -> Any:
    """Return a schema with the keywords of what it refers to beside its own.

    A reference that leads nowhere, or in a circle, is kept.
    """
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        try:
            found = target(root, reference)
        except ValueError:
            return schema
        own = {key: value for key, value in schema.items() if key != "$ref"}
        if not own:
            schema = found
            continue
        if not isinstance(found, dict):
            return schema if own.keys() - ANNOTATIONS else found
        if own.keys() & found.keys() & {"properties", "additionalProperties", "patternProperties"}:
            return schema  # what they say together is not one object of keywords
        schema = {**found, **own}
    return schema
