"""Wire request -> engine Request.

A value comes from the request, else from the model's generation config, else from the OpenAI API.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.readouts import PromptLogprobs
from engine.request import BeamParams, Request, SamplingParams
from server.limits import Limits, check_ids, check_num_answers, check_text, overflow, room_after
from server.logprobs import TokenDetails
from server.schema.chat import ChatRequest
from server.schema.completions import CompletionRequest
from server.schema.refused_fields import UnsupportedField
from server.schema.sampling import INT64
from server.schema.structured import Structured
from server.structured import grammar_of

if TYPE_CHECKING:
    pass

# One takes the loop 20 µs.
REQUESTS_PER_TURN = 64
# What has no small bound: a set of 150,000 ids takes 10 ms, a schema of 250,000 characters 3.
LARGE_FIELDS = (
    "allowed_token_ids",
    "first_token_ids",
    *Structured.model_fields,
)


async def make_requests(
    wire: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    answer_id: str,
    limits: Limits,
    *,
    default_max_tokens: int | None,
    prompt_param: str,
) -> list[Request]:
    """One engine request per answer: index = prompt number * n + sample number, sample i with seed + i.

    With best_of there are more samples, of which n become answers. Only the first of them returns prompt
    logprobs, unless they are streamed and cannot wait for each other.
    Raises InvalidRequest, ContextLengthExceeded.
    """
    n, n_param = wire.num_samples, "n" if wire.num_samples == wire.n else "best_of"
    if n > limits.max_num_seqs:
        raise InvalidRequest(f"{n_param} must be at most {limits.max_num_seqs} on this server.", n_param)
    check_num_answers(n * len(prompts), limits, n_param if n > 1 else prompt_param)
    if wire.priority and not limits.has_priorities:
        raise UnsupportedField("priority must be 0: this server serves first come, first served.", "priority")
    lengths = [
        output_length(wire, len(prompt), limits, default_max_tokens, prompt_param) for prompt in prompts
    ]
    if is_large(wire):
        shared = await asyncio.to_thread(sampling_params, wire, limits, lengths[0])
    else:
        shared = sampling_params(wire, limits, lengths[0])
    num_top = wire.num_prompt_logprobs
    readouts = () if num_top is None else (PromptLogprobs(num_top),)
    requests: list[Request] = []
    num_before = 0
    for prompt, max_tokens in zip(prompts, lengths, strict=True):
        if len(requests) - num_before >= REQUESTS_PER_TURN:
            num_before = len(requests)
            await asyncio.sleep(0)
        sampling = shared if max_tokens == shared.max_tokens else replace(shared, max_tokens=max_tokens)
        token_ids = tuple(prompt)
        for sample in range(n):
            if sampling.seed is not None and sample:
                seed = (sampling.seed + 1 + INT64) % (2 * INT64) - INT64
                sampling = replace(sampling, seed=seed)
            requests.append(
                Request(
                    f"{answer_id}-{len(requests)}",
                    token_ids,
                    sampling,
                    use_prefix_cache=wire.cache_prompt is not False,
                    cache_salt=wire.cache_salt,
                    priority=wire.priority or 0,
                    return_tokens=bool(wire.return_token_ids),
                    readouts=() if sample and not wire.stream else readouts,
                )
            )
    return requests


def output_length(
    wire: ChatRequest | CompletionRequest,
    num_prompt_tokens: int,
    limits: Limits,
    default_max_tokens: int | None,
    prompt_param: str,
) -> int:
    """Return the output tokens of an answer at most: a request must fit, the default (None: all) is cut.

    Raises InvalidRequest, ContextLengthExceeded.
    """
    max_tokens, limit_param = wire.limit
    room = room_after(num_prompt_tokens, limits, prompt_param)
    requested = default_max_tokens if max_tokens is None else max_tokens
    if room < (1 if requested is None else min(1, requested)):
        raise overflow(limits, f"there are {num_prompt_tokens} tokens in your {prompt_param}", prompt_param)
    if max_tokens is not None and max_tokens > room:
        asked = (
            f"you asked for {num_prompt_tokens} tokens of prompt and {max_tokens} of output ({limit_param})"
        )
        raise overflow(limits, asked, limit_param)
    most = room if requested is None else min(room, requested)
    if wire.min_tokens and wire.min_tokens > most:
        raise InvalidRequest(f"min_tokens must be at most {limit_param}, which is {most}.", "min_tokens")
    return most


def token_details(wire: ChatRequest | CompletionRequest) -> TokenDetails:
    """Return which details of its tokens an answer has."""
    return TokenDetails(
        num_logprobs=wire.num_logprobs,
        num_prompt_logprobs=wire.prompt_logprobs,
        has_ids=bool(wire.return_token_ids),
        ids_as_text=bool(wire.return_tokens_as_token_ids),
    )


def beam_params(wire: ChatRequest | CompletionRequest) -> BeamParams | None:
    """Return how to search for answers, or None if their tokens are sampled."""
    if not wire.use_beam_search:
        return None
    return BeamParams(
        width=max(wire.n or 1, wire.best_of or 1),
        length_penalty=1.0 if wire.length_penalty is None else wire.length_penalty,
        early_stopping=wire.early_stopping or False,
    )


def is_large(wire: ChatRequest | CompletionRequest) -> bool:
    """Check that sampling_params() may take milliseconds: with sets of token ids, or a schema."""
    return any(getattr(wire, name) is not None for name in LARGE_FIELDS)


def sampling_params(wire: ChatRequest | CompletionRequest, limits: Limits, max_tokens: int) -> SamplingParams:
    """Final values of every sampling parameter, for all answers of a request. Raises InvalidRequest."""
    bias = tuple((int(token_id), value) for token_id, value in (wire.logit_bias or {}).items())
    check_ids([token_id for token_id, _ in bias], "logit_bias", limits)
    check_ids(wire.stop_token_ids or (), "stop_token_ids", limits)
    check_ids(wire.allowed_token_ids or (), "allowed_token_ids", limits)
    check_ids(wire.first_token_ids or (), "first_token_ids", limits)
    for ids in wire.bad_words_ids or ():
        check_ids(ids, "bad_words_ids", limits)
    for text in wire.bad_words or ():
        check_text(text, "bad_words")
    num_logprobs = wire.num_logprobs
    if num_logprobs is None and wire.num_samples > (wire.n or 1):
        num_logprobs = 0  # to find the best ones

    def choose(name: str, fallback: float) -> float:
        value = getattr(wire, name)
        return float(value if value is not None else limits.generation_defaults.get(name, fallback))

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=wire.min_tokens or 0,
        temperature=choose("temperature", 1.0),
        top_p=choose("top_p", 1.0),
        top_k=max(0, int(choose("top_k", 0))),
        min_p=choose("min_p", 0.0),
        seed=wire.seed,
        presence_penalty=wire.presence_penalty or 0.0,
        frequency_penalty=wire.frequency_penalty or 0.0,
        repetition_penalty=choose("repetition_penalty", 1.0),
        logit_bias=bias,
        allowed_token_ids=frozenset(wire.allowed_token_ids or ()),
        first_token_ids=frozenset(wire.first_token_ids or ()),
        token_healing=isinstance(wire, CompletionRequest) and bool(wire.token_healing),
        bad_words=tuple(wire.bad_words or ()),
        bad_words_ids=tuple(map(tuple, wire.bad_words_ids or ())),
        logprobs=num_logprobs,
        stop=wire.stop or (),
        stop_token_ids=frozenset(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        include_stop_str_in_output=bool(wire.include_stop_str_in_output),
        skip_special_tokens=wire.skip_special_tokens is not False,
        repetition_stop=wire.repetition,
        grammar=grammar_of(wire),
    )
