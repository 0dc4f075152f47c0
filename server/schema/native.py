"""POST /, /generate and /generate_stream: one request for TGI and LightLLM, responses and events of each."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, RootModel, ValidationInfo, field_validator, model_validator

from server.schema.beam import MAX_BEST_OF
from server.schema.chat import WireResponse
from server.schema.errors import NativeError
from server.schema.fields import ONE, Refused, described, refuse_unsupported, strangers
from server.schema.logprobs import in_turns, is_none
from server.schema.sampling import INT64, MAX_TOP_LOGPROBS, SamplingRequest, Stop, WireRequest
from server.schema.structured import Source, TypedGrammar

IN_PARAMETERS = "it belongs in parameters"


def add_refused(schema: dict[str, Any]) -> None:
    """Tell the JSON schema which parameters are known and refused."""
    schema["properties"] |= described(PARAMETERS)


class GenerateParameters(SamplingRequest):
    """How to continue. The sampling fields that neither TGI nor LightLLM knows are extensions."""

    model_config = ConfigDict(json_schema_extra=add_refused)

    max_new_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="output tokens at most; default 100 (TGI) or 16 (LightLLM)"
    )
    min_new_tokens: int | None = Field(None, ge=0, lt=2**31, description="no end before so many tokens")
    do_sample: bool | None = Field(
        None,
        description="sample, rather than take the likeliest token. In TGI temperature, top_k, top_p and "
        "typical_p do that, too; in LightLLM the model's generation config decides the default",
    )
    seed: int | None = Field(None, ge=-INT64, le=2 * INT64 - 1, description="same seed, same sampling")
    stop_sequences: Stop | None = Field(None, description="LightLLM's name of stop")
    truncate: int | None = Field(None, ge=1, lt=2**31, description="keep the last so many tokens of inputs")
    return_full_text: bool | None = Field(None, description="put inputs in front of the text; default false")
    add_special_tokens: bool | None = Field(None, description="let the tokenizer add its own; default true")
    details: bool | None = Field(
        None, description="TGI: tell each token with its log-probability, and why the text ended"
    )
    decoder_input_details: bool | None = Field(
        None, description="TGI: with details, the tokens of inputs, too; not in a stream"
    )
    top_n_tokens: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="TGI: with details, the likeliest tokens in each place"
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_BEST_OF,
        description="TGI: texts to sample; that with the highest mean log-probability is the answer; "
        "not in a stream. LightLLM: another name of n",
    )
    return_details: bool | None = Field(
        None, description="LightLLM: tell each token with its log-probability; one event each in a stream"
    )
    grammar: TypedGrammar | None = Field(None, description="what the text must be, in TGI's words")
    guided_json: Source | None = Field(
        None, description="LightLLM: JSON schema of the text, or a string of it"
    )
    guided_grammar: str | None = Field(None, description="LightLLM: grammar of the text, GBNF or Lark")
    regular_constraint: str | None = Field(None, description="LightLLM: expression the whole text matches")

    @model_validator(mode="before")
    @classmethod
    def refuse(cls, value: Any) -> Any:
        """Refused fields come first, as at the top; what it raises is no matter of types."""
        if isinstance(value, dict):
            refuse_unsupported(value, PARAMETERS)
        return value

    @field_validator("top_n_tokens", "decoder_input_details")
    @classmethod
    def check_details(cls, value: int | None, info: ValidationInfo) -> int | None:
        """They stand in the details."""
        if value and not info.data.get("details"):
            raise ValueError("it needs details to be true")
        return value

    @model_validator(mode="after")
    def check_together(self) -> "GenerateParameters":
        """What is asked for under two names."""
        if self.stop and self.stop_sequences:
            raise ValueError("send stop or stop_sequences, not both")
        return self


class GenerateRequest(WireRequest):
    """Body of POST /, /generate and /generate_stream."""

    inputs: str
    parameters: GenerateParameters = Field(default_factory=lambda: GenerateParameters.model_validate({}))
    stream: bool | None = Field(None, description="what /generate_stream always does")
    model: str | None = Field(None, max_length=512, description="name from /v1/models; may be left out")

    @field_validator("parameters", mode="before")
    @classmethod
    def allow_null(cls, value: Any) -> Any:
        """No parameters at all."""
        return {} if value is None else value


TEXT_ONLY = Refused(({}, {"images": []}), "the model reads text only")
PARAMETERS: dict[str, Refused] = strangers(
    GenerateParameters,
    "it is a field of chat and completions",
    {
        "inputs": Refused((), "it belongs beside parameters"),
        "prompt": Refused((), "send inputs beside parameters"),
        "messages": Refused((), "send inputs beside parameters; chat takes messages"),
        "max_tokens": Refused((), "use max_new_tokens"),
        "max_completion_tokens": Refused((), "use max_new_tokens"),
        "min_tokens": Refused((), "use min_new_tokens"),
        "model": Refused((), "it belongs beside parameters"),
        "stream": Refused((False,), "it belongs beside parameters"),
        "stream_options": Refused(({},), "the last event always has the counts"),
        "truncate_prompt_tokens": Refused((), "use truncate"),
        # LightLLM
        "exponential_decay_length_penalty": Refused(([1, 1],)),
        "input_penalty": Refused((False,), "presence and frequency penalties count output tokens"),
        "add_spaces_between_special_tokens": Refused((True,)),
        "print_eos_token": Refused((False,), "use skip_special_tokens"),
        "disable_prompt_cache": Refused((False,), "use cache_prompt"),
        "image_max_patch_num": Refused((-1,), TEXT_ONLY.hint),
        "multimodal_params": TEXT_ONLY,
        "num_beam": ONE,
        "move_kv_to_decode_node": Refused(),
        "token_healing_top_k": Refused((0,)),
        "token_healing_unmerge_last_token": Refused((0,)),
    },
)
GENERATE: dict[str, Refused] = {
    name: refused for name, refused in PARAMETERS.items() if name not in GenerateRequest.model_fields
} | {
    name: Refused((), IN_PARAMETERS)
    for name in GenerateParameters.model_fields
    if name not in (*PARAMETERS, *GenerateRequest.model_fields)
}


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
    """How a text ended."""

    finish_reason: TgiReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiSequence(WireResponse):
    """How a text came about; `prefill` with decoder_input_details, `top_tokens` with top_n_tokens."""

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
    """How the answer came about, and with best_of the others."""

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
