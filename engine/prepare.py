"""From what a request asks of its tokens to the constraints that see to it."""

import asyncio
from dataclasses import replace

from engine.errors import InvalidRequest
from engine.request import Request, SamplingParams
from engine.text.after_reasoning import bind
from engine.text.bad_words import BadWords, spellings
from engine.text.first_token import FirstToken
from engine.text.grammar import GrammarCompiler
from engine.text.healing import Healing, num_taken_back
from engine.text.tokenizer import TokenizerPool


async def prepare(
    request: Request, tokenizer: TokenizerPool, grammars: GrammarCompiler, eos_token_ids: tuple[int, ...]
) -> Request:
    """The request with its constraints. Raises InvalidRequest.

    What takes long is done off the loop, which calls this.
    """
    sampling = request.sampling
    check_together(sampling, frozenset(eos_token_ids))
    if sampling.bad_words:
        ids = await spellings(
            sampling.bad_words, lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
        sampling = replace(sampling, bad_words=(), bad_words_ids=(*sampling.bad_words_ids, *ids))
    if sampling.token_healing and not sampling.max_tokens:
        sampling = replace(sampling, token_healing=False)
    if sampling.token_healing:
        await asyncio.to_thread(lambda: tokenizer.pieces.by_bytes)
        prompt = request.prompt_token_ids
        end = len(prompt) - num_taken_back(prompt, tokenizer.pieces)
        sampling = replace(sampling, token_healing=False, healed_token_ids=prompt[end:])
        request = replace(request, prompt_token_ids=prompt[:end])
    constraints = (
        *request.constraints,
        *BadWords.of(sampling),
        *FirstToken.of(sampling),
        *Healing.of(sampling, tokenizer.pieces),
    )
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
    """Refuse what would leave a first token no choice. Raises InvalidRequest."""
    asked = {
        "token_healing": sampling.token_healing,
        "first_token_ids": bool(sampling.first_token_ids),
        "a grammar": sampling.grammar is not None,
    }
    params = [name for name, is_asked in asked.items() if is_asked]
    if len(params) > 1:
        raise InvalidRequest(f"{params[0]} cannot be used together with {params[1]}.", params[0])
    if sampling.first_token_ids:
        token_ids = sampling.first_token_ids
        if sampling.allowed_token_ids:
            token_ids &= sampling.allowed_token_ids
        token_ids -= {ids[0] for ids in sampling.bad_words_ids if len(ids) == 1}
        if sampling.min_tokens:
            token_ids -= sampling.stop_token_ids
            if not sampling.ignore_eos:
                token_ids -= eos_token_ids
        if not token_ids:
            raise InvalidRequest(
                "first_token_ids names no token that the other fields let be chosen.",
                "first_token_ids",
            )
