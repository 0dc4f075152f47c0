"""Fields of all requests that generate text: sampling, stopping, streaming; and token counts."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from engine.readouts import MAX_LOGPROBS
from engine.request import MAX_LOGIT_BIAS
from server.schema.wire import Finite, ModelRequest, Wire, WireRequest, check_entries

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
INT64 = 2**63


def check_stop(value: Any) -> Any:
    """Return a stop string, or a list of at most 16, as a tuple; the empty string is refused."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, got {len(texts)}")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise ValueError(f"stop strings must have 1 to {MAX_STOP_CHARS} characters")
    if any("\0" in text for text in texts):
        raise ValueError("must not contain NUL characters")
    return tuple(texts)


STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            "maxItems": MAX_STOPS,
        },
    ]
}
PROMPT_LOGPROBS = Field(
    None,
    ge=0,
    le=MAX_LOGPROBS,
    description="return the logprob of each prompt token and the top N at its position; bypasses the prefix "
    "cache; not with stream",
)


def check_prompt_logprobs(value: int | None, info: ValidationInfo) -> int | None:
    """Refuse prompt logprobs in a stream."""
    if value is not None and info.data.get("stream"):
        raise ValueError("it cannot be told in a stream")
    return value


Stop = Annotated[tuple[str, ...], BeforeValidator(check_stop), WithJsonSchema(STOP_SCHEMA)]


class StreamOptions(WireRequest):
    """Options that only count together with `stream`."""

    include_usage: bool | None = Field(None, description="send one last chunk with the token counts")
    continuous_usage_stats: bool | None = Field(None, description="send the token counts with every chunk")
    include_obfuscation: bool | None = Field(None, description="without effect: nothing is padded")


class Sampling(ModelRequest):
    """Fields of every request that generates text. null always means: use the default."""

    n: Annotated[int | None, Wire(neutral=(1,))] = Field(
        None, ge=1, le=MAX_CHOICES, description="answers per prompt; at most max_num_seqs"
    )
    stream: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="send server-sent events while tokens arrive"
    )
    stream_options: Annotated[StreamOptions | None, Wire(neutral=({},))] = None
    temperature: Annotated[Finite | None, Wire(neutral=(1,))] = Field(
        None, ge=0, le=2, description="0 is greedy; default 1"
    )
    top_p: Annotated[Finite | None, Wire(neutral=(1,))] = Field(
        None, gt=0, le=1, description="nucleus sampling; default 1 (off)"
    )
    top_k: Annotated[int | None, Wire(neutral=(0, -1))] = Field(
        None, ge=-1, lt=2**31, description="0 or -1 is off; default off"
    )
    min_p: Annotated[Finite | None, Wire(neutral=(0,))] = Field(
        None,
        ge=0,
        le=1,
        description="drop tokens less likely than min_p times the likeliest; default 0 (off)",
    )
    seed: Annotated[int | None, Wire(aliases=("random_seed",))] = Field(
        None, ge=-INT64, lt=INT64, description="same seed, same sampling; choice i of n uses seed + i"
    )
    presence_penalty: Annotated[Finite | None, Wire(neutral=(0,), with_beams=False)] = Field(
        None, ge=-2, le=2, description="over output tokens; default 0"
    )
    frequency_penalty: Annotated[Finite | None, Wire(neutral=(0,), with_beams=False)] = Field(
        None, ge=-2, le=2, description="over output tokens; default 0"
    )
    repetition_penalty: Annotated[
        Finite | None, Wire(neutral=(1,), aliases=("repeat_penalty",), with_beams=False)
    ] = Field(
        None,
        ge=0.01,
        le=100,
        description="over prompt and output tokens, as in transformers; default 1 (off)",
    )
    logit_bias: Annotated[
        dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None,
        check_entries(MAX_LOGIT_BIAS),
        Wire(neutral=({},), with_beams=False),
    ] = Field(
        None, max_length=MAX_LOGIT_BIAS, description="token id, as a string, to what is added to its logit"
    )
    allowed_token_ids: Annotated[list[int] | None, Wire(with_beams=False)] = Field(
        None, min_length=1, fail_fast=True, description="the only tokens that can be chosen; default: all"
    )
    bad_words: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]] | None,
        Wire(neutral=([],), with_beams=False),
    ] = Field(
        None, max_length=MAX_BAD_WORDS, description="words that do not appear, as the tokenizer spells them"
    )
    bad_words_ids: Annotated[
        list[Annotated[list[int], Field(min_length=1, max_length=MAX_BAD_WORD_TOKENS, fail_fast=True)]]
        | None,
        Wire(neutral=([],), with_beams=False),
    ] = Field(None, max_length=MAX_BAD_WORDS, description="bad_words as token ids")
    stop: Annotated[
        Stop | None, Wire(neutral=([],), aliases=("stop_sequences", "stopping_strings"), with_beams=False)
    ] = Field(None, description="strings that end the answer and are not shown")
    stop_token_ids: Annotated[list[int] | None, Wire(neutral=([],))] = Field(
        None, max_length=MAX_STOP_IDS, fail_fast=True, description="token ids that end the answer"
    )
    min_tokens: Annotated[int | None, Wire(neutral=(0,), aliases=("min_new_tokens",))] = Field(
        None, ge=0, lt=2**31, description="generate at least this many tokens; default 0"
    )
    ignore_eos: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="continue after the end-of-sequence token; default false"
    )
    include_stop_str_in_output: Annotated[bool | None, Wire(neutral=(False,), aliases=("no_stop_trim",))] = (
        Field(None, description="show the stop string that ended the answer; default false")
    )
    skip_special_tokens: Annotated[bool | None, Wire(neutral=(True,))] = Field(
        None, description="hide special tokens; default true"
    )
    cache_prompt: Annotated[bool | None, Wire(neutral=(True,))] = Field(
        None, description="use the prefix cache, and leave the prompt in it; default true"
    )
    cache_salt: Annotated[str | None, Wire(aliases=("extra_key",))] = Field(
        None,
        min_length=1,
        max_length=128,
        description="share cached prefixes only among requests with this salt",
    )
    priority: Annotated[int | None, Wire(neutral=(0,))] = Field(
        None, ge=-(2**31), lt=2**31, description="lower is served earlier; only where the server has it on"
    )

    @field_validator("logit_bias")
    @classmethod
    def check_bias_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        """Refuse keys that are not token ids in decimal; the vocabulary is checked later."""
        for key in value or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"keys must be token ids, got {key[:64]!r}")
        return value


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens were cached."""

    cached_tokens: int = Field(description="prompt tokens taken from the prefix cache")


class CompletionTokensDetails(BaseModel):
    """How many of the sampled tokens are reasoning."""

    reasoning_tokens: int = Field(description="up to the end of the reasoning, with its markers")


class Usage(BaseModel):
    """Token counts, from the engine's own ledger. With n > 1 the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int = Field(description="sampled tokens, with the one that ended the answer")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


Finish = Literal["stop", "length"]
