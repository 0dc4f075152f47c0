"""Lists all kinds of constraints. A new kind is a module with applies() and make(), and one entry here."""

from typing import Protocol

from engine.constraint import Constraint
from engine.constraints import after_reasoning, bad_words, first_token, token_healing
from engine.constraints.grammar import CompiledGrammar
from engine.request import SamplingParams
from engine.text.token_bytes import TokenPieces


class ConstraintKind(Protocol):
    """A module of this package that turns sampling parameters into a constraint."""

    def applies(self, sampling: SamplingParams) -> bool:
        """Return True if the sampling parameters ask for a constraint of this kind."""

    def make(
        self, sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None
    ) -> Constraint:
        """Return the constraint, for sampling parameters it applies to; `compiled` is their grammar."""


# The grammar comes last: the token that begins reasoning is allowed only if the kinds before allow it.
KINDS: tuple[ConstraintKind, ...] = (bad_words, first_token, token_healing, after_reasoning)


def is_constrained(sampling: SamplingParams) -> bool:
    """Return True if sampling parameters ask for any constraint."""
    return any(kind.applies(sampling) for kind in KINDS)


def constraints_of(
    sampling: SamplingParams, pieces: TokenPieces, compiled: CompiledGrammar | None
) -> tuple[Constraint, ...]:
    """Return the constraints that sampling parameters ask for; `compiled` is their grammar, if any."""
    return tuple(kind.make(sampling, pieces, compiled) for kind in KINDS if kind.applies(sampling))
