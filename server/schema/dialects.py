"""Tables of the fields that each request refuses: every field that any request knows and it does not have.

What is known is derived from the requests: the fields they declare, those they refuse in their own words, and
the aliases of other servers. A field that acts in one request is never ignored in another.
"""

from collections.abc import Iterable, Mapping

from server.schema.aliases import NO_LIMIT, aliases_of, declared_aliases
from server.schema.foreign import FOREIGN, NO_OPS
from server.schema.refused_fields import Refused
from server.schema.wire import Wire, WireRequest, wire_of

# Fields that are similar to another one, which the hint names.
NEAR = {
    "max_length": "max_tokens",
    "min_length": "min_tokens",
    "text": "response_format",
    "output_config": "response_format",
    "output_format": "response_format",
    "regular_constraint": "guided_regex",
}

Tables = Mapping[type[WireRequest], Mapping[str, Refused]]


def refused_tables(requests: Iterable[type[WireRequest]]) -> Tables:
    """Return what each of the requests, and of those nested in them, refuses."""
    known = KnownFields(requests)
    tables = {request: known.refused_by(request) for request in known.requests}
    for request in known.requests:
        for name, nested in request.NESTED.items():
            misplaced = Refused((), f"it belongs in {name}")
            inner = tables[nested]
            outer = {**inner, **{field: misplaced for field in nested.model_fields if field not in inner}}
            tables[request] = {
                field: row for field, row in outer.items() if field not in request.model_fields
            }
    return tables


class KnownFields:
    """Every field that one of the requests declares or refuses, and what is said where it does not act."""

    def __init__(self, requests: Iterable[type[WireRequest]]) -> None:
        outer = list(dict.fromkeys(requests))
        self.requests = [inner for request in outer for inner in (*request.NESTED.values(), request)]
        self._aliases: dict[str, str] = {}
        self._wire: dict[str, Wire] = {}
        owners: dict[str, dict[str, None]] = {}
        known: dict[str, Refused] = {}
        for request in self.requests:
            self._aliases |= declared_aliases(request)
            for name, wire in wire_of(request).items():
                if wire != Wire() or name not in self._wire:
                    self._wire[name] = wire
                if request.DIALECT:
                    owners.setdefault(name, {})[request.DIALECT] = None
            known = {**request.REFUSED, **known}
        for name, names in owners.items():
            hint = f"it is a field of {listed(names)}"
            known[name] = Refused(self._neutral(name), hint, self._wire[name].same_as)
        known |= FOREIGN
        self.fields = {name: row for name, row in known.items() if name not in NO_OPS}
        self.prompt_fields = {name for name, wire in self._wire.items() if wire.shapes_prompt} | {
            name
            for table in (FOREIGN, *(request.REFUSED for request in self.requests))
            for name, row in table.items()
            if row.shapes_prompt
        }

    def refused_by(self, request: type[WireRequest]) -> dict[str, Refused]:
        """Return what a request refuses: known fields it does not take, and its own table."""
        if request.REFUSES == "own":
            return dict(request.REFUSED)
        taken = {*request.model_fields, *aliases_of(request)}
        refused = {name: row for name, row in self.fields.items() if name not in taken}
        if request.HINT:
            others = refused.keys() - FOREIGN.keys()
            refused |= {name: refused[name]._replace(hint=request.HINT) for name in others}
        refused |= request.REFUSED
        for name, field in (self._aliases | NEAR).items():
            if not (name in taken or name in FOREIGN or name in request.REFUSED):
                words = refused[field].hint if field in refused else f"use {field}"
                neutral = self._neutral(name) or self._neutral(field)
                refused[name] = Refused(neutral + ((-1,) if name in NO_LIMIT else ()), words)
        if request.REFUSES == "prompt":
            return {name: row for name, row in refused.items() if name in self.prompt_fields}
        return refused

    def _neutral(self, name: str) -> tuple[object, ...]:
        return self._wire[name].neutral if name in self._wire else ()


def listed(names: Iterable[str]) -> str:
    """Return names as they are written in a sentence."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
