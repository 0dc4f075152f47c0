"""From what a request asks of its tokens to the constraints that see to it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.constraint import Constraint
from engine.constraints.after_reasoning import bind
from engine.constraints.bad_words import BadWords, spellings
from engine.constraints.first_token import FirstToken
from engine.constraints.grammar import GrammarCompiler
from engine.constraints.token_healing import Healing, num_taken_back
from engine.errors import InvalidRequest
from engine.request import MAX_SMALL_SET, Request, SamplingParams
from engine.text.tokenizer import TokenizerPool

# What decides which tokens may come, whatever the prompt is.
RULES = (
    "min_tokens",
    "allowed_token_ids",
    "first_token_ids",
    "token_healing",
    "bad_words",
    "bad_words_ids",
    "stop_token_ids",
    "ignore_eos",
    "grammar",
)


# One takes the loop up to 50 µs.
REQUESTS_PER_TURN = 64


class Ruled(NamedTuple):
    """What is made of rules once for all requests that share them."""

    bad_words_ids: tuple[tuple[int, ...], ...]
    constraints: tuple[Constraint, ...]


async def prepare(
    requests: Sequence[Request],
    tokenizer: TokenizerPool,
    grammars: GrammarCompiler,
    eos_token_ids: tuple[int, ...],
) -> list[Request]:
    """The requests with their constraints. Raises InvalidRequest.

    What takes long is done off the loop, which calls this, and once where one request has the rules of the
    one before: those of a client's thousand prompts are the same objects, found equal at once.
    """
    prepared: list[Request] = []
    rules, ruled = None, None
    for number, request in enumerate(requests, 1):
        if number % REQUESTS_PER_TURN == 0:
            await asyncio.sleep(0)
        wanted = tuple(getattr(request.sampling, name) for name in RULES)
        if ruled is None or wanted != rules:
            rules, ruled = wanted, await rule(request.sampling, tokenizer, frozenset(eos_token_ids))
        prepared.append(await follow(request, ruled, tokenizer, grammars))
    return prepared


async def rule(sampling: SamplingParams, tokenizer: TokenizerPool, eos_token_ids: frozenset[int]) -> Ruled:
    """Check what sampling parameters ask for together, and spell it. Raises InvalidRequest."""
    if sampling.bad_words:
        ids = await spellings(
            sampling.bad_words, lambda texts: tokenizer.encode_batch(texts, add_special_tokens=False)
        )
        sampling = replace(sampling, bad_words_ids=(*sampling.bad_words_ids, *ids))
    if max(len(sampling.first_token_ids), len(sampling.allowed_token_ids)) > MAX_SMALL_SET:
        await asyncio.to_thread(check_together, sampling, eos_token_ids)
    else:
        check_together(sampling, eos_token_ids)
    return Ruled(sampling.bad_words_ids, (*BadWords.of(sampling), *FirstToken.of(sampling)))


async def follow(
    request: Request, ruled: Ruled, tokenizer: TokenizerPool, grammars: GrammarCompiler
) -> Request:
    """One request with its constraints. Raises InvalidRequest."""
    sampling = request.sampling
    if not (ruled.bad_words_ids or ruled.constraints or sampling.token_healing or sampling.grammar):
        return request
    sampling = replace(sampling, bad_words=(), bad_words_ids=ruled.bad_words_ids)
    if sampling.token_healing and not sampling.max_tokens:
        sampling = replace(sampling, token_healing=False)
    if sampling.token_healing:
        prompt = request.prompt_token_ids
        end = len(prompt) - num_taken_back(prompt, tokenizer.pieces)
        sampling = replace(sampling, token_healing=False, healed_token_ids=prompt[end:])
        request = replace(request, prompt_token_ids=prompt[:end])
    constraints = (*request.constraints, *ruled.constraints, *Healing.of(sampling, tokenizer.pieces))
    if sampling.grammar is not None:
        constraints += (bind(await grammars.compile(sampling.grammar), sampling),)
    return replace(request, sampling=sampling, constraints=constraints)


def is_prepared(request: Request) -> bool:
    """Whether nothing is asked of a request's tokens that nobody has seen to."""
    sampling = request.sampling
    if sampling.bad_words or sampling.token_healing:
        return False
    asks = sampling.grammar or sampling.first_token_ids or sampling.healed_token_ids or BadWords.of(sampling)
    return bool(request.constraints) or not asks


def check_together(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    """Refuse what would leave a token no choice. Raises InvalidRequest."""
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
            raise InvalidRequest(f"{name} names no token that the other fields let be chosen.", name)
