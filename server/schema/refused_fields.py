"""Refuses the fields that a request knows and does not have, unless their value leaves the answer as it is.

Ignoring a field that would change or constrain the output would return something else than what was asked
for. Each request's table of such fields is made in `dialects`. A field that is in none is unknown: it is
accepted, since clients send fields of their own, and logged once.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.errors import InvalidRequest


class UnsupportedField(InvalidRequest):
    """A field that is known and would change the output, but does not act here."""


class Refused(NamedTuple):
    """A known field that a request does not have.

    `neutral` are the values that are accepted (null always is) and `hint` is the advice for all others;
    `same_as` names a field of the same body whose value is accepted, too. `shapes_prompt` says that the field
    could change the tokens of a prompt.
    """

    neutral: tuple[Any, ...] = ()
    hint: str = ""
    same_as: str | None = None
    shapes_prompt: bool = False


def described(table: Mapping[str, Refused]) -> dict[str, Any]:
    """Return the JSON schemas of fields that are accepted only with their neutral values."""
    return {
        name: {"enum": [None, *refused.neutral], "description": refusal("not supported", refused)}
        for name, refused in table.items()
    }


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, Refused]) -> None:
    """Raise UnsupportedField for the first field of a body whose value would have to act and does not."""
    for name, value in fields.items():
        refused = table.get(name)
        if refused is None or is_neutral(value, refused.neutral):
            continue
        if refused.same_as and type(value) is int and value == (fields.get(refused.same_as) or 1):
            continue
        raise UnsupportedField(f"{refusal(f'{name} is not supported', refused)}.", name)


def refusal(what: str, refused: Refused) -> str:
    """Return `what` is wrong, followed by the hint if there is one."""
    return f"{what}: {refused.hint}" if refused.hint else what


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Check that a value leaves the answer as it is. True is not 1 and False is not 0 here."""
    if value is None:
        return True
    is_bool = isinstance(value, bool)
    return any(isinstance(other, bool) == is_bool and other == value for other in neutral)
