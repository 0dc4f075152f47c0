"""POST /, /generate and /generate_stream: one request for TGI and LightLLM, responses and events of each."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, RootModel

from server.schema.errors import NativeError
from server.schema.generate_parameters import GenerateParameters
from server.schema.logprobs import in_turns, is_none
from server.schema.wire import ModelRequest, WireRequest, WireResponse


def as_object(value: Any) -> Any:
    """Return an empty object for null."""
    return {} if value is None else value


class GenerateRequest(ModelRequest):
    """Body of POST /, /generate and /generate_stream."""

    NESTED: ClassVar[Mapping[str, type[WireRequest]]] = {"parameters": GenerateParameters}

    inputs: str
    parameters: Annotated[GenerateParameters, BeforeValidator(as_object)] = Field(
        default_factory=lambda: GenerateParameters.model_validate({})
    )
    stream: bool | None = Field(None, description="what /generate_stream always does")


TgiReason = Literal["length", "eos_token", "stop_sequence"]


class TgiPrefillToken(WireResponse):
    """A token of the prompt; nothing comes before the first."""

    id: int
    text: str
    logprob: float | None


class TgiToken(WireResponse):
    """One token with details; else new text, of one token or more: what belongs to a single one is null."""

    id: int | None = None
    text: str
    logprob: float | None = None
    special: bool


class TgiStreamDetails(WireResponse):
    """The end of a text."""

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiSequence(WireResponse):
    """Details of a text; `prefill` with decoder_input_details, `top_tokens` with top_n_tokens."""

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    prefill: Annotated[list[TgiPrefillToken], in_turns(TgiPrefillToken)]
    tokens: Annotated[list[TgiToken], in_turns(TgiToken)]
    top_tokens: Annotated[list[list[TgiToken]], in_turns(list[TgiToken])] | None = Field(
        None, exclude_if=is_none
    )


class TgiBestOfSequence(TgiSequence):
    """A text that was not the best."""

    generated_text: str


class TgiDetails(TgiSequence):
    """Details of the answer, and with best_of of the other texts."""

    best_of_sequences: list[TgiBestOfSequence] | None = Field(None, exclude_if=is_none)


class TgiResponse(WireResponse):
    """TGI's answer of POST /generate; POST / puts it in a list."""

    generated_text: str
    details: TgiDetails | None = Field(None, exclude_if=is_none)


class TgiEvent(WireResponse):
    """TGI's event of a stream, with details one for each token; only the last has `generated_text`."""

    index: int = Field(description="output tokens so far")
    token: TgiToken
    top_tokens: list[TgiToken] | None = Field(default=None, exclude_if=is_none)
    generated_text: str | None
    details: TgiStreamDetails | None = None


LightllmReason = Literal["stop", "length"]


class LightllmToken(WireResponse):
    """One token with return_details; else new text, and null for what belongs to a single token."""

    count_output_tokens: int
    id: int | None = None
    text: str
    logprob: float | None = None
    special: bool
    prompt_tokens: int


LightllmTokens = Annotated[list[LightllmToken], in_turns(LightllmToken)]


class LightllmResponse(WireResponse):
    """LightLLM's answer of POST /generate; with n > 1 the counts, reasons and tokens are lists of them."""

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: LightllmReason | list[LightllmReason]
    prompt_tokens: int
    tokens: LightllmTokens | list[LightllmTokens] | None = Field(
        None, exclude_if=is_none, description="only with return_details"
    )


class LightllmEvent(WireResponse):
    """LightLLM's event of a stream."""

    token: LightllmToken
    generated_text: None = None
    finished: bool
    finish_reason: LightllmReason | None
    details: None = None


class GenerateResponse(RootModel[TgiResponse | list[TgiResponse] | LightllmResponse]):
    """The answer in the dialect that `generate_api` says."""


class GenerateEvent(RootModel[TgiEvent | LightllmEvent | NativeError]):
    """One event of a stream in the dialect that `generate_api` says."""
