"""Rewrites JSON schemas for llguidance 1.9, so that every accepted schema is enforced exactly.

llguidance reads every number as a double, allows the bound itself where an exclusive bound shares its integer
part with the other bound, and does not limit the cost of `multipleOf`. Such schemas are rewritten to
equivalent ones that it enforces, or refused; lenient schemas lose the keyword instead.
https://json-schema.org/draft/2020-12/json-schema-validation
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine.constraints.schema_cost import MAX_REMAINDERS, check_merges, remainders, target
from engine.constraints.schema_neutral import expressible
from engine.constraints.schema_objects import close_objects
from engine.constraints.schema_walk import NAMED, VALUES

MAX_DEPTH = 64
MAX_EXACT_INT = 2**53  # beyond, doubles have gaps
MAX_BOUND = 2**63 - 1024  # the largest double below the largest integer that llguidance knows
MAX_DIGITS = 15  # what a double keeps of any decimal number
# Distance from an exclusive bound to the first allowed number, as a share of the gap between the bounds.
EXCLUDED = 1e-9

# Keywords about strings and multiples.
OF_TEXTS = frozenset(("pattern", "format", "multipleOf", "patternProperties"))
LOWER = ("minimum", "exclusiveMinimum")
UPPER = ("maximum", "exclusiveMaximum")


def load(source: str) -> dict[str, Any]:
    """Parse a schema. Raises ValueError, or RecursionError for JSON nested hundreds of levels deep."""
    schema = json.loads(source, parse_constant=_no_number)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object")
    return schema


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def ready(schema: dict[str, Any], *, closes_objects: bool = False) -> dict[str, Any]:
    """Return a schema that llguidance enforces exactly. Raises ValueError if there is none.

    With `closes_objects`, objects that list properties have no others: see close_objects().
    """
    found = _rewritten(schema, None, closes_objects=closes_objects)
    check_merges(found)
    return found


def ready_leniently(
    schema: dict[str, Any], is_pattern: Callable[[str], bool], *, closes_objects: bool = False
) -> dict[str, Any]:
    """Like `ready`, but drop keywords that cannot be enforced, such as patterns `is_pattern` rejects."""
    found = _rewritten(schema, is_pattern, closes_objects=closes_objects)
    try:
        check_merges(found)
    except ValueError:
        found = without_patterns(found)
    return found


def without_patterns(schema: Any) -> Any:
    """Return a rewritten schema without its keywords about strings, property names and multiples."""
    if isinstance(schema, list):
        return [without_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = OF_TEXTS | {"additionalProperties"} if "patternProperties" in schema else OF_TEXTS
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in left_out:
            continue
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: without_patterns(item) for name, item in value.items()}
        else:
            found[key] = value if key in VALUES else without_patterns(value)
    return found


def _rewritten(
    schema: dict[str, Any], is_pattern: Callable[[str], bool] | None, *, closes_objects: bool
) -> dict[str, Any]:
    _check_depth(schema)
    schema = expressible(schema)
    if closes_objects:
        close_objects(schema)
    found: dict[str, Any] = _Rewriter(schema, is_pattern).schema(schema)
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
    """Rewrites a schema in one pass; lenient with an `is_pattern`."""

    def __init__(self, root: dict[str, Any], is_pattern: Callable[[str], bool] | None) -> None:
        self._root = root
        self._is_pattern = is_pattern

    def schema(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.schema(item) for item in node]
        if not isinstance(node, dict):
            return node
        found: dict[str, Any] = {}
        for key, value in node.items():
            if key == "$id" or (key == "$schema" and "json-schema.org" not in str(value)):
                continue  # names; references to other documents are not followed
            if not self._passes(self._check, key, value):
                continue
            if key in NAMED and isinstance(value, dict):
                found[key] = {name: self.schema(item) for name, item in value.items()}
            elif key in VALUES:
                found[key] = value
            else:
                found[key] = self.schema(value)
        if self._is_pattern is not None:
            self._leave_out(found, self._is_pattern)
        if not self._passes(_exclude, found):
            for key in (*LOWER, *UPPER):
                found.pop(key, None)
        return found

    def _passes(self, check: Callable[..., None], *args: Any) -> bool:
        """Return True if a check raises no ValueError; raise it unless the schema is lenient."""
        try:
            check(*args)
        except ValueError:
            if self._is_pattern is None:
                raise
            return False
        return True

    def _check(self, key: str, value: Any) -> None:
        """Raise ValueError for numbers that cannot be enforced as written."""
        if key in ("const", "enum"):
            _check_exact(key, value)
        elif not is_number(value):
            return
        elif isinstance(value, float) and math.isinf(value):
            raise ValueError(f"{key} has a number that is too large")
        elif key == "multipleOf" and value > 0 and remainders(value) > MAX_REMAINDERS:
            raise ValueError("multipleOf leaves too many remainders")

    def _leave_out(self, node: dict[str, Any], is_pattern: Callable[[str], bool]) -> None:
        """Remove keywords that only a lenient schema may have."""
        pattern, reference, named = (node.get(key) for key in ("pattern", "$ref", "patternProperties"))
        if isinstance(pattern, str) and not is_pattern(pattern):
            del node["pattern"]
        if isinstance(reference, str) and not self._passes(target, self._root, reference):
            del node["$ref"]
        if isinstance(named, dict):
            node["patternProperties"] = {name: schema for name, schema in named.items() if is_pattern(name)}
            if len(node["patternProperties"]) < len(named):
                node.pop("additionalProperties", None)  # it would forbid the properties that were left out


def is_number(value: Any) -> bool:
    """Return True for a number in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_exact(key: str, value: Any) -> None:
    """Raise ValueError for a constant with numbers that llguidance changes."""
    long_numbers = []
    for number in _numbers(value):
        if isinstance(number, float) and math.isinf(number):
            raise ValueError(f"{key} has a number that is too large")
        if isinstance(number, int) and abs(number) > MAX_EXACT_INT:
            raise ValueError(f"{key} has an integer beyond 2**53, which cannot be enforced")
        if isinstance(number, float) and num_digits(number) > MAX_DIGITS:
            long_numbers.append(number)
    for number, written in zip(long_numbers, _as_written(long_numbers), strict=True):
        if number != written:
            raise ValueError(f"{key} has the number {number!r}, which cannot be enforced")


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a value."""
    stack = [value]
    while stack:
        item = stack.pop()
        if is_number(item):
            yield item
        elif isinstance(item, dict | list):
            stack += item.values() if isinstance(item, dict) else item


def num_digits(value: float) -> int:
    """Return the number of significant digits."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


def _as_written(numbers: Sequence[float]) -> list[float]:
    """Return the numbers that llguidance would write: it may be wrong in the last digit."""
    constants = [{"const": number} for number in numbers]
    exactly = {"type": "array", "prefixItems": constants, "minItems": len(constants), "items": False}
    grammar = LLMatcher.grammar_from_json_schema(exactly, overrides={"whitespace_flexible": False})
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    written: list[float] = json.loads(bytes(matcher.compute_ff_tokens())) if numbers else []
    return written


@cache
def byte_tokenizer() -> LLTokenizer:
    """Return a tokenizer of no model, for trying schemas out."""
    return LLTokenizer("byte")


def _exclude(node: dict[str, Any]) -> None:
    """Rewrite exclusive bounds that llguidance does not enforce. Raises ValueError if no number is left."""
    for keys, sign in ((LOWER, 1), (UPPER, -1)):
        for key in keys:
            if is_number(node.get(key)):
                node[key] = _inner(node[key], sign)
    lower = max((node[key] for key in LOWER if is_number(node.get(key))), default=-math.inf)
    upper = min((node[key] for key in UPPER if is_number(node.get(key))), default=math.inf)
    if node.get("type") == "integer" or math.isinf(upper - lower) or math.trunc(lower) != math.trunc(upper):
        return
    # llguidance allows the bound nearer to 0.
    step = (upper - lower) * EXCLUDED
    inclusive, exclusive = LOWER if upper > 0 else UPPER
    bound, inner = (lower, lower + step) if upper > 0 else (upper, upper - step)
    if is_number(node.get(exclusive)) and node[exclusive] == bound and lower < upper:
        if inner == bound:
            raise ValueError(f"{exclusive} {bound:g} is too near to the other bound")
        del node[exclusive]
        node[inclusive] = inner


def _inner(bound: float, sign: int) -> float:
    """Return the nearest allowed number that llguidance represents; `sign` 1: lower bound, -1: upper."""
    if sign * bound > MAX_BOUND:
        raise ValueError("a bound beyond 2**63 cannot be enforced")
    if sign * bound < -MAX_BOUND:
        return -sign * MAX_BOUND
    if isinstance(bound, int):
        nearest = float(sign * bound)
        if nearest < sign * bound:
            nearest = math.nextafter(nearest, math.inf)
        return bound if abs(bound) <= MAX_EXACT_INT else sign * int(nearest)
    if num_digits(bound) <= MAX_DIGITS:
        return bound
    context = Context(MAX_DIGITS, ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    return float(context.create_decimal(repr(bound)))
