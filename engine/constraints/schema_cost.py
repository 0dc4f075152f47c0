"""Bounds the cost of merging the parts of a JSON schema: the expressions and multiples of one value.

The work of llguidance doubles with each expression and grows with the least common multiple, and it cannot be
interrupted.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

# Of patterns and formats of one value; 13 take a third of a second, and each more doubles the time.
MAX_TOGETHER = 8
# Of multipleOf; a prime of this size takes two or three seconds.
MAX_REMAINDERS = 65_536
MAX_PLACES = 10_000

# Keywords that merge a schema with others, and all keywords that restrict a value.
MERGING = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
SAYING = MERGING | frozenset(
    (
        "type",
        "enum",
        "const",
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "multipleOf",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
    )
)
# Keywords with schemas, one or several, about values inside the one that the schema is about.
INSIDE = ("items", "prefixItems", "additionalProperties", "unevaluatedProperties", "contains")

Place = tuple[str, ...]


class Cost(NamedTuple):
    """The cost of one value: the number of expressions it must match, and the multiple it must be."""

    num_expressions: int
    remainders: int

    def and_(self, other: "Cost") -> "Cost":
        """Return the cost if both apply."""
        return Cost(self.num_expressions + other.num_expressions, math.lcm(self.remainders, other.remainders))

    def or_(self, other: "Cost") -> "Cost":
        """Return the highest cost if one of the two applies."""
        return Cost(max(self.num_expressions, other.num_expressions), max(self.remainders, other.remainders))


NONE = Cost(0, 1)


def check_merges(root: dict[str, Any]) -> None:
    """Raise ValueError if more than MAX_TOGETHER patterns, or too many multiples, apply to one value."""
    merges = _Merges(root)
    for schema in _dicts(root):
        if "multipleOf" not in schema and not _is_merged(schema):
            continue
        for found in merges.costs(schema).values():
            if found.num_expressions > MAX_TOGETHER:
                raise ValueError(f"more than {MAX_TOGETHER} patterns apply to the same text")
            if found.remainders > MAX_REMAINDERS:
                raise ValueError("multipleOf leaves too many remainders")


def remainders(multiple: Any) -> int:
    """Return the number of remainders of a multiple, without powers of ten, which cost nothing."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or multiple <= 0:
        return 1
    return int("".join(map(str, Decimal(repr(multiple)).normalize().as_tuple().digits)))


def target(root: Any, reference: str) -> Any:
    """Return the schema a reference points to. Raises ValueError if it is not in this document."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"the $ref {reference[:200]!r} points outside the schema")
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise ValueError(f"the $ref {reference[:200]!r} points to nothing")
    return found


def _is_merged(schema: dict[str, Any]) -> bool:
    """Return True if a schema merges parts with each other or with keywords of its own."""
    said = schema.keys() & SAYING
    return not said.isdisjoint(MERGING) and (len(said) > 1 or len(_list(schema.get("allOf"))) > 1)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a value, including itself."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


class _Merges:
    """The costs of a document's schemas, by the place of the value: a path of property names."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, dict[Place, Cost]] = {}

    def costs(self, node: Any) -> dict[Place, Cost]:
        """Return the costs of a schema with all that it merges. Raises ValueError for too many places."""
        if not isinstance(node, dict):
            return {}
        known = self._known.get(id(node))
        if known is not None:
            return known
        found: dict[Place, Cost] = {}
        self._known[id(node)] = found  # a schema that contains itself counts once
        own = Cost(("pattern" in node) + ("format" in node), remainders(node.get("multipleOf")))
        if own != NONE:
            found[()] = own
        for part in _list(node.get("allOf")):
            self._add(found, self.costs(part))
        for key in ("anyOf", "oneOf"):
            self._add(found, self._either(self.costs(part) for part in _list(node.get(key))))
        if isinstance(reference := node.get("$ref"), str):
            self._add(found, self.costs(target(self._root, reference)))
        properties = node.get("properties")
        for name, part in properties.items() if isinstance(properties, dict) else ():
            self._add(found, {(name, *place): cost for place, cost in self.costs(part).items()})
        others = self._either(self.costs(part) for part in _others(node))
        self._add(found, {("*", *place): cost for place, cost in others.items()})
        if len(found) > MAX_PLACES:
            raise ValueError("it is made of too many parts with patterns")
        return found

    @staticmethod
    def _add(found: dict[Place, Cost], more: dict[Place, Cost]) -> None:
        for place, cost in more.items():
            found[place] = found.get(place, NONE).and_(cost)

    @staticmethod
    def _either(parts: Iterator[dict[Place, Cost]]) -> dict[Place, Cost]:
        found: dict[Place, Cost] = {}
        for part in parts:
            for place, cost in part.items():
                found[place] = found.get(place, NONE).or_(cost)
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _others(node: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas about values inside the one that `node` is about, except its named properties."""
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        yield from patterns.values()
    for key in INSIDE:
        part = node.get(key)
        yield from part if isinstance(part, list) else (part,)
