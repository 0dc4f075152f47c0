"""The parameters of POST /, /generate and /generate_stream: one list for TGI and LightLLM."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.readouts import MAX_LOGPROBS
from server.schema.beam import MAX_BEST_OF
from server.schema.foreign import ONE, prompt_field
from server.schema.refused_fields import Refused
from server.schema.sampling import INT64, Sampling, Stop
from server.schema.structured import Source, TypedGrammar
from server.schema.wire import Wire

TEXT_ONLY = "the model reads text only"


class GenerateParameters(Sampling):
    """Parameters of the continuation. Sampling fields that neither TGI nor LightLLM knows are extensions."""

    DIALECT = "/generate"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
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
        "response_format": Refused(({"type": "text"},), "use grammar"),
        "guided_regex": Refused((), "use regular_constraint"),
        # LightLLM
        "exponential_decay_length_penalty": Refused(([1, 1],)),
        "input_penalty": Refused((False,), "presence and frequency penalties count output tokens"),
        "add_spaces_between_special_tokens": Refused((True,)),
        "print_eos_token": Refused((False,), "use skip_special_tokens"),
        "disable_prompt_cache": Refused((False,), "use cache_prompt"),
        "image_max_patch_num": Refused((-1,), TEXT_ONLY),
        "multimodal_params": prompt_field(({}, {"images": []}), TEXT_ONLY),
        "num_beam": ONE,
        "move_kv_to_decode_node": Refused(),
        "token_healing_top_k": Refused((0,)),
        "token_healing_unmerge_last_token": Refused((0,)),
    }

    max_new_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="output tokens at most; default 100 (TGI) or 16 (LightLLM)"
    )
    min_new_tokens: int | None = Field(None, ge=0, lt=2**31, description="generate at least this many tokens")
    do_sample: bool | None = Field(
        None,
        description="sample, rather than take the likeliest token. In TGI temperature, top_k, top_p and "
        "typical_p do that, too; in LightLLM the model's generation config decides the default",
    )
    seed: int | None = Field(None, ge=-INT64, le=2 * INT64 - 1, description="same seed, same sampling")
    stop_sequences: Stop | None = Field(None, description="LightLLM's name of stop")
    truncate: int | None = Field(None, ge=1, lt=2**31, description="keep the last N tokens of inputs")
    return_full_text: bool | None = Field(None, description="put inputs in front of the text; default false")
    add_special_tokens: bool | None = Field(None, description="let the tokenizer add its own; default true")
    details: bool | None = Field(
        None, description="TGI: return each token with its logprob, and why the text ended"
    )
    decoder_input_details: bool | None = Field(
        None, description="TGI: with details, the tokens of inputs, too; not in a stream"
    )
    top_n_tokens: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="TGI: with details, the top N tokens at each position"
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_BEST_OF,
        description="TGI: texts to sample; that with the highest mean log-probability is the answer; "
        "not in a stream. LightLLM: another name of n",
    )
    return_details: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="LightLLM: return each token with its logprob; one event each in a stream"
    )
    grammar: TypedGrammar | None = Field(None, description="what the text must be, in TGI's words")
    guided_json: Source | None = Field(
        None, description="LightLLM: JSON schema of the text, or a string of it"
    )
    guided_grammar: str | None = Field(None, description="LightLLM: grammar of the text, GBNF or Lark")
    regular_constraint: str | None = Field(None, description="LightLLM: expression the whole text matches")

    @field_validator("top_n_tokens", "decoder_input_details")
    @classmethod
    def check_details(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse parts of the details without details."""
        if value and not info.data.get("details"):
            raise ValueError("it needs details to be true")
        return value

    @model_validator(mode="after")
    def check_together(self) -> "GenerateParameters":
        """Refuse stop strings under two names."""
        if self.stop and self.stop_sequences:
            raise ValueError("send stop or stop_sequences, not both")
        return self
