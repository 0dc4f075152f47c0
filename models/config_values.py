"""Reads single values of a configuration; an error names the key. Null is the same as a missing key."""

import sys
from collections.abc import Mapping
from typing import Any

from models.errors import ModelError


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number. Raises ModelError for another value, KeyError if it is missing and needed."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise ModelError(f"{key} is {value!r:.99}, which is not a whole number")
    return int(value)


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number that is not negative, as count() does."""
    value = _value(config, key, default)
    if not is_number(value) or value < 0:
        raise ModelError(f"{key} is {value!r:.99}, which is not a number of at least 0")
    return float(value)


def is_number(value: Any) -> bool:
    """Return True for a number within the range of float64; true and false are none."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number above 0, as count() does."""
    value = number(config, key, default)
    if value == 0:
        raise ModelError(f"{key} is 0, which is not a number above 0")
    return value


def flag(config: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """Return true or false. Raises ModelError for another value."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r:.99}, which is neither true nor false")
    return value


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a JSON object, an empty one if it is missing. Raises ModelError for another value."""
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise ModelError(f"{key} is {value!r:.99}, which is not a JSON object")
    return value or {}


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise KeyError(key)
    return value
