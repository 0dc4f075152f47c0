"""POST /v1/completions: request, response and stream chunk."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from server.schema.chat import WireResponse
from server.schema.logprobs import CompletionLogprobs, is_none
from server.schema.sampling import MAX_TOP_LOGPROBS, Finish, Usage
from server.schema.structured import StructuredRequest

MAX_PROMPTS = 1024

Prompt = str | list[int]


def check_prompts(value: Any) -> tuple[Prompt, ...]:
    """The four spellings of OpenAI (text, texts, ids, lists of ids) as a tuple of prompts.

    Written by hand because a union of list types would be tried type by type, token by token.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        return (check_ids(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request, got {len(value)}")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(value)
    if all(isinstance(prompt, list) for prompt in value):
        return tuple(check_ids(prompt) for prompt in value)
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def check_ids(ids: list[Any]) -> list[int]:
    """A non-empty list of non-negative integers; their upper bound is the model's matter."""
    if not ids:
        raise ValueError("a list of token ids must not be empty")
    if set(map(type, ids)) != {int}:
        raise ValueError("token ids must be integers")
    if min(ids) < 0:
        raise ValueError("token ids must not be negative")
    return ids


IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        IDS_SCHEMA,
        {"type": "array", "items": IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(StructuredRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(check_prompts), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="output tokens at most; default 16")
    add_special_tokens: bool | None = Field(
        None,
        description="let the tokenizer add its special tokens (such as BOS) to text prompts; default true",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="tell the log-probability of each token, and of so many most likely ones in its place",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="spell the tokens of log-probabilities as token_id:7; default false"
    )
    return_token_ids: bool | None = Field(
        None, description="tell the ids of the prompt's and all sampled tokens; default false"
    )

    @property
    def limit(self) -> tuple[int | None, str]:
        """The output tokens asked for, and the field that asks."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many most likely tokens are told in each place; None without log-probabilities."""
        return self.logprobs


class CompletionChoice(WireResponse):
    """One answer; index = prompt number times n plus sample number."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish
    stop_reason: str | int | None = Field(
        None, description="the stop string or token id that ended the answer"
    )
    token_ids: list[int] | None = Field(
        None, exclude_if=is_none, description="with return_token_ids: of all sampled tokens, shown or not"
    )
    prompt_token_ids: list[int] | None = Field(
        None, exclude_if=is_none, description="only with return_token_ids"
    )


class CompletionResponse(WireResponse):
    """Answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(WireResponse):
    """The part of a chunk that belongs to one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = Field(None, description="only in the chunk that ends the answer")
    token_ids: list[int] | None = Field(None, description="only with return_token_ids")
    prompt_token_ids: list[int] | None = Field(
        None, description="in the first chunk of each choice, only with return_token_ids"
    )


class CompletionChunk(WireResponse):
    """One event of a streamed answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = Field(None, description="null until the last chunk; only with include_usage")
