"""JSON schemas made ready for llguidance, so that what is accepted is obeyed to the letter.

llguidance reads every number as a double, lets the bound itself through where an exclusive one shares its
integer part with the other, and takes no bound on what `multipleOf` costs. Here such a schema is rewritten
into one that it does obey, or refused; what is `lenient` loses the keyword instead.
https://json-schema.org/draft/2020-12/json-schema-validation
"""

import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from engine.text.schema_merges import check_merges

MAX_DEPTH = 64
# What the remainders of all multipleOf in a schema may come to together: compiling takes a second for these.
MAX_REMAINDERS = 16_384
MAX_EXACT_INT = 2**53  # beyond, doubles have gaps
MAX_BOUND = 2**63 - 1024  # the largest double below the largest integer that llguidance knows
MAX_DIGITS = 15  # what a double keeps of any decimal number
# Of the gap between two bounds: how far from an exclusive one its numbers begin.
EXCLUDED = 1e-9

# Keywords with schemas by name, and with values that are no schemas.
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("const", "enum", "default", "examples"))
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")

# Patterns with look-around that libraries write for their own types, without it.
KNOWN_PATTERNS = {
    # pydantic, Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    # zod, email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}


def load(source: str) -> dict[str, Any]:
    """A schema from JSON. Raises ValueError, or RecursionError for JSON that is nested by the hundreds."""
    schema = json.loads(source, parse_constant=_no_number)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return schema


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def ready(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as llguidance can obey it. Raises ValueError for one that it cannot."""
    return _rewritten(schema, None)


def ready_leniently(schema: dict[str, Any], is_pattern: Callable[[str], bool]) -> dict[str, Any]:
    """The same without what cannot be enforced, be it only patterns that are none for `is_pattern`."""
    return _rewritten(schema, is_pattern)


def _rewritten(schema: dict[str, Any], is_pattern: Callable[[str], bool] | None) -> dict[str, Any]:
    _check_depth(schema)
    found: dict[str, Any] = _Rewriter(is_pattern).schema(schema)
    check_merges(found)
    return found


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


class _Rewriter:
    """One pass over a schema; the remainders of all its numbers may meet in one."""

    def __init__(self, is_pattern: Callable[[str], bool] | None) -> None:
        self._is_pattern = is_pattern
        self._remainders = 1

    def schema(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.schema(item) for item in node]
        if not isinstance(node, dict):
            return node
        found: dict[str, Any] = {}
        for key, value in node.items():
            if not self._passes(self._check, key, value):
                continue
            if key in NAMED and isinstance(value, dict):
                found[key] = {name: self.schema(item) for name, item in value.items()}
            elif key in VALUES:
                found[key] = value
            else:
                found[key] = self.schema(value)
        if self._is_pattern is not None:
            _leave_out(found, self._is_pattern)
        if isinstance(pattern := found.get("pattern"), str):
            found["pattern"] = KNOWN_PATTERNS.get(pattern, pattern)
        if not self._passes(_exclude, found):
            for key in (*LOWER, *UPPER):
                found.pop(key, None)
        return found

    def _passes(self, check: Callable[..., None], *args: Any) -> bool:
        """Whether a check raises no ValueError, which it may only for what is lenient."""
        try:
            check(*args)
        except ValueError:
            if self._is_pattern is None:
                raise
            return False
        return True

    def _check(self, key: str, value: Any) -> None:
        """Raises ValueError for numbers that are not taken as they are written."""
        if key in ("const", "enum"):
            _check_exact(key, value)
        elif not is_number(value):
            return
        elif isinstance(value, float) and math.isinf(value):
            raise ValueError(f"{key} has a number that is too large")
        elif key == "multipleOf" and value > 0:
            digits = Decimal(repr(value)).normalize().as_tuple().digits
            remainders = math.lcm(self._remainders, int("".join(map(str, digits))))
            if remainders > MAX_REMAINDERS:
                raise ValueError("multipleOf has too many remainders, together with the others of the schema")
            self._remainders = remainders


def is_number(value: Any) -> bool:
    """Whether a value is a number in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_exact(key: str, value: Any) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_exact(key, item)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        if abs(value) > MAX_EXACT_INT:
            raise ValueError(f"{key} has an integer beyond 2**53, which cannot be enforced")
    elif isinstance(value, float) and (
        math.isinf(value) or len(Decimal(repr(value)).normalize().as_tuple().digits) > MAX_DIGITS
    ):
        raise ValueError(f"{key} has a number of more than {MAX_DIGITS} digits, which cannot be enforced")


def _leave_out(node: dict[str, Any], is_pattern: Callable[[str], bool]) -> None:
    """Take out of a schema what only a lenient one may have."""
    pattern, reference, named = (node.get(key) for key in ("pattern", "$ref", "patternProperties"))
    if isinstance(pattern, str) and not is_pattern(KNOWN_PATTERNS.get(pattern, pattern)):
        del node["pattern"]
    if isinstance(reference, str) and not reference.startswith("#"):
        del node["$ref"]
    if isinstance(named, dict):
        node["patternProperties"] = {name: schema for name, schema in named.items() if is_pattern(name)}


def _exclude(node: dict[str, Any]) -> None:
    """Rewrite bounds that llguidance would let numbers through at. Raises ValueError if none is left."""
    for keys, sign in ((LOWER, 1), (UPPER, -1)):
        for key in keys:
            value = node.get(key)
            if isinstance(value, int) and abs(value) > MAX_EXACT_INT:
                node[key] = _inner(value, sign)
    lower = max((node[key] for key in LOWER if is_number(node.get(key))), default=-math.inf)
    upper = min((node[key] for key in UPPER if is_number(node.get(key))), default=math.inf)
    if node.get("type") == "integer" or math.isinf(upper - lower) or math.trunc(lower) != math.trunc(upper):
        return
    step = (upper - lower) * EXCLUDED
    for (inclusive, exclusive), bound, inner in ((LOWER, lower, lower + step), (UPPER, upper, upper - step)):
        if is_number(node.get(exclusive)) and node[exclusive] == bound and step > 0:
            if inner == bound:
                raise ValueError(f"{exclusive} {bound:g} is too near to the other bound")
            del node[exclusive]
            node[inclusive] = inner


def _inner(bound: int, sign: int) -> int:
    """The nearest double inside a lower bound (`sign` 1) or an upper one (-1) that llguidance knows."""
    if sign * bound > MAX_BOUND:
        raise ValueError("a bound beyond 2**63 cannot be enforced")
    nearest = float(max(sign * bound, -MAX_BOUND))
    if nearest < sign * bound:
        nearest = math.nextafter(nearest, math.inf)
    return sign * int(nearest)
