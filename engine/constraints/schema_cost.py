"""What a value must be at once where the parts of a JSON schema are merged: expressions, and multiples.

The compiler's work doubles with each expression and grows with the least common multiple, and cannot be
stopped.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

# Of patterns and formats; 13 take a third of a second, each more doubles that.
MAX_TOGETHER = 8
# Of multipleOf; a prime of this size takes two or three seconds.
MAX_REMAINDERS = 65_536
MAX_PLACES = 10_000

# What merges a schema with others, and what does not say anything of a value beside that.
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
# Keywords with schemas, one or several, about other values than the one the schema is about.
INSIDE = ("items", "prefixItems", "additionalProperties", "unevaluatedProperties", "contains")

Place = tuple[str, ...]


class Demands(NamedTuple):
    """What is asked of one value: how many expressions match it, and what it is a multiple of."""

    num_expressions: int
    remainders: int

    def both(self, other: "Demands") -> "Demands":
        """What is asked where both hold."""
        return Demands(
            self.num_expressions + other.num_expressions, math.lcm(self.remainders, other.remainders)
        )

    def either(self, other: "Demands") -> "Demands":
        """At most what is asked where one of the two holds."""
        return Demands(
            max(self.num_expressions, other.num_expressions), max(self.remainders, other.remainders)
        )


NONE = Demands(0, 1)


def check_merges(root: dict[str, Any]) -> None:
    """Raises ValueError if more than MAX_TOGETHER patterns, or too many multiples, may apply to one value."""
    merges = _Merges(root)
    for schema in _dicts(root):
        if "multipleOf" not in schema and not _is_merged(schema):
            continue
        for found in merges.demands(schema).values():
            if found.num_expressions > MAX_TOGETHER:
                raise ValueError(f"more than {MAX_TOGETHER} patterns apply to the same text")
            if found.remainders > MAX_REMAINDERS:
                raise ValueError("multipleOf leaves too many remainders")


def remainders(multiple: Any) -> int:
    """How many remainders a multiple leaves, but for what powers of ten add, which costs nothing."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or multiple <= 0:
        return 1
    return int("".join(map(str, Decimal(repr(multiple)).normalize().as_tuple().digits)))


def target(root: Any, reference: str) -> Any:
    """What a reference within a schema leads to. Raises ValueError for one that leads out or nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"the $ref {reference[:200]!r} leads out of the schema")
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise ValueError(f"the $ref {reference[:200]!r} leads nowhere")
    return found


def _is_merged(schema: dict[str, Any]) -> bool:
    """Whether a schema says more than one of its parts does."""
    said = schema.keys() & SAYING
    return not said.isdisjoint(MERGING) and (len(said) > 1 or len(_list(schema.get("allOf"))) > 1)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a value, itself included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


class _Merges:
    """What the schemas of a document demand, by the place of the value: a path of property names."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, dict[Place, Demands]] = {}

    def demands(self, node: Any) -> dict[Place, Demands]:
        """Those of a schema, with what is merged into it. Raises ValueError if there are too many places."""
        if not isinstance(node, dict):
            return {}
        known = self._known.get(id(node))
        if known is not None:
            return known
        found: dict[Place, Demands] = {}
        self._known[id(node)] = found  # where a schema contains itself, once is enough
        own = Demands(("pattern" in node) + ("format" in node), remainders(node.get("multipleOf")))
        if own != NONE:
            found[()] = own
        for part in _list(node.get("allOf")):
            self._add(found, self.demands(part))
        for key in ("anyOf", "oneOf"):
            self._add(found, self._either(self.demands(part) for part in _list(node.get(key))))
        if isinstance(reference := node.get("$ref"), str):
            self._add(found, self.demands(target(self._root, reference)))
        properties = node.get("properties")
        for name, part in properties.items() if isinstance(properties, dict) else ():
            self._add(found, {(name, *place): asked for place, asked in self.demands(part).items()})
        others = self._either(self.demands(part) for part in _others(node))
        self._add(found, {("*", *place): asked for place, asked in others.items()})
        if len(found) > MAX_PLACES:
            raise ValueError("it is made of too many parts with patterns")
        return found

    @staticmethod
    def _add(found: dict[Place, Demands], more: dict[Place, Demands]) -> None:
        for place, asked in more.items():
            found[place] = found.get(place, NONE).both(asked)

    @staticmethod
    def _either(parts: Iterator[dict[Place, Demands]]) -> dict[Place, Demands]:
        found: dict[Place, Demands] = {}
        for part in parts:
            for place, asked in part.items():
                found[place] = found.get(place, NONE).either(asked)
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _others(node: dict[str, Any]) -> Iterator[Any]:
    """The schemas about values inside the one that `node` is about, but for its named properties."""
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        yield from patterns.values()
    for key in INSIDE:
        part = node.get(key)
        yield from part if isinstance(part, list) else (part,)
