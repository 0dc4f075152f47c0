"""Rewrites arrays without repeated items for llguidance, which does not know `uniqueItems`.

If the items are a few listed values, the arrays are listed, too: those of `a` and `b` are `[]`, `["a"]`,
`["b"]`, `["a", "b"]` and `["b", "a"]`.
"""

from itertools import permutations
from math import perm
from typing import Any

from engine.constraints.schema_disjoint import NAMES
from engine.constraints.schema_walk import ANNOTATIONS, resolved

# Arrays of one schema and of one document: five values have 326, which make a mask take 0.8 ms.
MAX_ARRAYS = 400
MAX_ARRAYS_TOGETHER = 4_000
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KEPT = ANNOTATIONS | {"$defs", "definitions"}
REPLACED = frozenset(("type", "items", "uniqueItems", "minItems", "maxItems"))


class UniqueItems:
    """Rewrites the arrays of one document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_left = MAX_ARRAYS_TOGETHER

    def rewrite(self, node: dict[str, Any]) -> Any:
        """Return an equal schema without `uniqueItems`, or the schema as it is if there is none."""
        if node.get("uniqueItems") is not True:
            return node
        least, most = node.get("minItems", 0), node.get("maxItems")
        if type(most) is int and most <= 1:
            return {key: value for key, value in node.items() if key != "uniqueItems"}
        values = self._values(node.get("items"))
        if values is None or node.get("type") != "array" or node.keys() - KEPT - REPLACED:
            return node
        if type(least) is not int or type(most) not in (int, type(None)):
            return node
        lengths = range(max(least, 0), min(len(values) if most is None else most, len(values)) + 1)
        if not lengths:
            return False  # there are not as many values
        num_arrays = sum(perm(len(values), length) for length in lengths)
        if num_arrays > min(MAX_ARRAYS, self._num_left):
            return node
        self._num_left -= num_arrays
        kept = {key: value for key, value in node.items() if key in KEPT}
        return kept | {
            "anyOf": [_array(items) for length in lengths for items in permutations(values, length)]
        }

    def _values(self, items: Any) -> list[Any] | None:
        """Return the different values that a schema lists; None if it has others, or restricts them."""
        items = resolved(self._root, items)
        if not isinstance(items, dict):
            return None
        said = items.keys() - ANNOTATIONS - {"type"}
        listed = [items["const"]] if said == {"const"} else items.get("enum") if said == {"enum"} else None
        if not isinstance(listed, list) or len(listed) > MAX_ARRAYS:
            return None
        if not all(type(value) in NAMES for value in listed):
            return None
        kind = items.get("type")
        if kind is not None and not all(type(value) in PYTHON_TYPES.get(str(kind), ()) for value in listed):
            return None
        return list({(NAMES[type(value)], value): value for value in listed}.values())


def _array(items: tuple[Any, ...]) -> dict[str, Any]:
    """Return the schema of one array."""
    if not items:
        return {"type": "array", "maxItems": 0}
    constants = [{"const": item} for item in items]
    return {"type": "array", "prefixItems": constants, "items": False, "minItems": len(items)}
