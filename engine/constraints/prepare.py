"""Prepares requests for submit(): spells words as tokens, and builds constraints from sampling parameters."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from engine.constraint import Constraint
from engine.constraints.bad_words import spellings
from engine.constraints.grammar import GrammarCompiler
from engine.constraints.kinds import constraints_of, is_constrained
from engine.constraints.token_healing import num_taken_back
from engine.errors import InvalidRequest
from engine.request import MAX_SMALL_SET, Request, SamplingParams
from engine.text.token_bytes import TokenPieces
from engine.text.tokenizer_pool import TokenizerPool

# Requests with equal values of these fields share their constraints. The others differ between the prompts
# and choices of one client, so no constraint may depend on them.
SHARED_FIELDS = tuple(
    field.name for field in fields(SamplingParams) if field.name not in ("seed", "max_tokens")
)
# One takes the loop up to 50 µs.
REQUESTS_PER_TURN = 64


class SharedConstraints(NamedTuple):
    """The prepared values of all requests with equal SHARED_FIELDS."""

    bad_words_ids: tuple[tuple[int, ...], ...]
    constraints: tuple[Constraint, ...]


async def prepare(
    requests: Sequence[Request],
    tokenizer: TokenizerPool,
    grammars: GrammarCompiler,
    eos_token_ids: tuple[int, ...],
) -> list[Request]:
    """Return the requests with their constraints. Raises InvalidRequest.

    Runs on the loop, and slow work in threads. Constraints are built once for consecutive requests with equal
    SHARED_FIELDS; for a client's thousand prompts these are the same objects, so comparing them is quick.
    """
    prepared: list[Request] = []
    shared_values, shared = None, None
    for number, request in enumerate(requests, 1):
        if number % REQUESTS_PER_TURN == 0:
            await asyncio.sleep(0)
        values = tuple(getattr(request.sampling, name) for name in SHARED_FIELDS)
        if shared is None or values != shared_values:
            shared_values = values
            shared = await prepare_shared(request.sampling, tokenizer, grammars, frozenset(eos_token_ids))
        prepared.append(prepare_one(request, shared, tokenizer.pieces))
    return prepared


async def prepare_shared(
    sampling: SamplingParams,
    tokenizer: TokenizerPool,
    grammars: GrammarCompiler,
    eos_token_ids: frozenset[int],
) -> SharedConstraints:
    """Check sampling parameters against each other and build their constraints. Raises InvalidRequest."""
    if sampling.bad_words:
        ids = await spellings(
            sampling.bad_words, lambda texts: tokenizer.encode_batch(texts, add_special_tokens=False)
        )
        sampling = replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *ids))
    if max(len(sampling.first_token_ids), len(sampling.allowed_token_ids)) > MAX_SMALL_SET:
        await asyncio.to_thread(check_together, sampling, eos_token_ids)
    else:
        check_together(sampling, eos_token_ids)
    compiled = None if sampling.grammar is None else await grammars.compile(sampling.grammar)
    return SharedConstraints(sampling.bad_words_ids, constraints_of(sampling, tokenizer.pieces, compiled))


def prepare_one(request: Request, shared: SharedConstraints, pieces: TokenPieces) -> Request:
    """Return a request with its constraints; with `token_healing` its prompt loses its last token."""
    sampling, constraints = request.sampling, shared.constraints
    if not (shared.bad_words_ids or constraints or sampling.token_healing):
        return request
    is_healed = sampling.token_healing and sampling.max_tokens
    sampling = replace(sampling, bad_words=(), bad_words_ids=shared.bad_words_ids, token_healing=False)
    if is_healed:
        prompt = request.prompt_token_ids
        end = len(prompt) - num_taken_back(prompt, pieces)
        sampling = replace(sampling, healed_token_ids=prompt[end:])
        request = replace(request, prompt_token_ids=prompt[:end])
        constraints = constraints_of(sampling, pieces, None)  # check_together() refuses a grammar beside it
    return replace(request, sampling=sampling, constraints=(*request.constraints, *constraints))


def is_prepared(request: Request) -> bool:
    """Return False for a request that asks for constraints and has not been through prepare()."""
    sampling = request.sampling
    if sampling.bad_words or sampling.token_healing:  # prepare() replaces both by token ids
        return False
    return bool(request.constraints) or not is_constrained(sampling)


def check_together(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    """Refuse sampling parameters that together allow no token. Raises InvalidRequest."""
    asked = {
        "token_healing": sampling.token_healing,
        "first_token_ids": bool(sampling.first_token_ids),
        "a grammar": sampling.grammar is not None,
    }
    params = [name for name, is_asked in asked.items() if is_asked]
    if len(params) > 1:
        raise InvalidRequest(f"{params[0]} cannot be used together with {params[1]}.", params[0])
    banned = {ids[0] for ids in sampling.bad_words_ids if len(ids) == 1}
    if sampling.min_tokens:
        banned |= sampling.stop_token_ids
        if not sampling.ignore_eos:
            banned |= eos_token_ids
    token_ids = sampling.allowed_token_ids
    for name in ("allowed_token_ids", "first_token_ids"):
        named: frozenset[int] = getattr(sampling, name)
        if not named:
            continue
        token_ids = token_ids & named if token_ids else named
        if token_ids <= banned:
            raise InvalidRequest(f"{name} contains no token that the other fields allow.", name)
