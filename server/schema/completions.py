"""POST /v1/completions: request, response and stream chunk."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator
from pydantic.functional_validators import PlainValidator

from engine.readouts import MAX_LOGPROBS
from server.schema.beam import MAX_BEST_OF, Beams
from server.schema.extensions import Extensions
from server.schema.logprobs import CompletionLogprobs, PromptLogprobs, is_none
from server.schema.refused_fields import Refused
from server.schema.sampling import PROMPT_LOGPROBS, Finish, Sampling, Usage, check_prompt_logprobs
from server.schema.structured import Structured
from server.schema.wire import Wire, WireResponse

MAX_PROMPTS = 1024
NOT_WITH_HEALING = (
    "use_beam_search",
    "allowed_token_ids",
    "first_token_ids",
    "bad_words",
    "bad_words_ids",
    "logprobs",
    "prompt_logprobs",
    "suffix",
)

Prompt = str | list[int]


def check_prompts(value: Any, most: int = MAX_PROMPTS, what: str = "prompts") -> tuple[Prompt, ...]:
    """The four spellings of OpenAI (text, texts, ids, lists of ids) as a tuple of at most `most` prompts.

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
    if len(value) > most:
        raise ValueError(f"at most {most} {what} are allowed in one request, got {len(value)}")
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


def prompt_schema(most: int) -> dict[str, Any]:
    """Return the JSON schema of what check_prompts() takes."""
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most},
            IDS_SCHEMA,
            {"type": "array", "items": IDS_SCHEMA, "minItems": 1, "maxItems": most},
        ]
    }


class CompletionRequest(Extensions, Beams, Structured, Sampling):
    """Body of POST /v1/completions."""

    DIALECT = "completions"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        "top_logprobs": Refused((0,), "logprobs says how many"),
        "messages": Refused((), "/v1/completions takes a prompt; chat takes messages"),
    }

    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(check_prompts),
        WithJsonSchema(prompt_schema(MAX_PROMPTS)),
        Wire(shapes_prompt=True),
    ]
    best_of: Annotated[int | None, Wire(same_as="n")] = Field(
        None,
        ge=1,
        le=MAX_BEST_OF,
        description="continuations to compute for each prompt, of which the n with the highest mean "
        "log-probability are the answers, or beams to search with; default n. Not in a stream",
    )
    echo: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="put the prompt in front of the text, and of its log-probabilities; default false"
    )
    suffix: Annotated[str | None, Wire(neutral=("",), shapes_prompt=True)] = Field(
        None, description="text after the answer; for models that can fill in the middle"
    )
    max_tokens: Annotated[
        int | None,
        Wire(
            aliases=(
                "max_new_tokens",
                "max_output_tokens",
                "n_predict",
                "num_predict",
                "max_completion_tokens",
            )
        ),
    ] = Field(None, ge=0, lt=2**31, description="output tokens at most; default 16; 0 only with echo")
    add_special_tokens: Annotated[bool | None, Wire(shapes_prompt=True)] = Field(
        None,
        description="let the tokenizer add its special tokens (such as BOS) to text prompts; default true",
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="return the logprob of each token and the top N at its position",
    )
    prompt_logprobs: int | None = PROMPT_LOGPROBS
    return_tokens_as_token_ids: bool | None = Field(
        None, description="spell the tokens of logprobs as token_id:7; default false"
    )
    return_token_ids: bool | None = Field(
        None, description="return the ids of the prompt's and all sampled tokens; default false"
    )

    token_healing: Annotated[bool | None, Wire(neutral=(False,), shapes_prompt=True)] = Field(
        None,
        description="take the last token of the prompt back, and let the answer begin with its text, in "
        "whichever tokens; default false",
    )

    @field_validator("token_healing")
    @classmethod
    def check_healing(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        """Refuse fields that restrict the first tokens, or that return tokens."""
        for name in NOT_WITH_HEALING if value else ():
            given = info.data.get(name)
            if given is not False and given not in (None, [], ""):  # 0 log-probabilities are some
                raise ValueError(f"it cannot be used together with {name}")
        return value

    @field_validator("max_tokens")
    @classmethod
    def check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse an answer without tokens, unless the prompt is echoed."""
        if value == 0 and not info.data.get("echo"):
            raise ValueError("it must be at least 1, or 0 together with echo")
        return value

    @field_validator("best_of")
    @classmethod
    def check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse fewer samples than answers, and choosing among them in a stream."""
        if value is not None and value < (info.data.get("n") or 1):
            raise ValueError("it must be at least n")
        if value is not None and value > (info.data.get("n") or 1) and info.data.get("stream"):
            raise ValueError("the best are known only at the end: it must equal n in a stream")
        return value

    _check_prompt_logprobs = field_validator("prompt_logprobs")(check_prompt_logprobs)

    @property
    def limit(self) -> tuple[int | None, str]:
        """Return the requested number of output tokens, and the field it is in."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of top logprobs at each position; None without logprobs."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of top logprobs at each position of the prompt, echoed or not; None without."""
        counts = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((num_top for num_top in counts if num_top is not None), default=None)

    @property
    def num_samples(self) -> int:
        """Continuations computed for each prompt."""
        return self.n or 1 if self.use_beam_search else max(self.n or 1, self.best_of or 1)


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
    prompt_logprobs: PromptLogprobs | None = Field(
        None,
        exclude_if=is_none,
        description="only if requested: the candidates at each position, by token id",
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
