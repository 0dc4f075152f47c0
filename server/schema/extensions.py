"""Fields that chat and completions have in common, and no other dialect has."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from engine.request import MAX_REPEATED_SIZES, MAX_REPEATED_TOKENS, RepetitionStop
from server.schema.aliases import aliases_of, described_names
from server.schema.wire import Wire, WireRequest

NOT_WITH_BEAM_SEARCH = "it cannot be used together with use_beam_search"


class RepetitionOptions(WireRequest):
    """Ends an answer that repeats one ngram."""

    ngram: int = Field(ge=1, le=MAX_REPEATED_TOKENS // 2, description="tokens that are repeated")
    times: int = Field(ge=2, le=MAX_REPEATED_TOKENS, description="how often they come, in a row")

    @model_validator(mode="after")
    def check_length(self) -> "RepetitionOptions":
        """Bound the tokens that each new one is compared with."""
        if self.ngram * self.times > MAX_REPEATED_TOKENS:
            raise ValueError(f"ngram times times must be at most {MAX_REPEATED_TOKENS}")
        return self


class RepetitionDetection(WireRequest):
    """vLLM's form of repetition_stop: ends an answer that repeats a pattern of any size between two."""

    max_pattern_size: int | None = Field(
        None, ge=0, le=MAX_REPEATED_SIZES, description="tokens that are repeated, at most; default 0 (off)"
    )
    min_pattern_size: int | None = Field(
        None, ge=0, le=MAX_REPEATED_SIZES, description="tokens that are repeated, at least; default 1"
    )
    min_count: int | None = Field(
        None, ge=0, le=MAX_REPEATED_TOKENS, description="how often they come, in a row: at least 2"
    )

    @model_validator(mode="after")
    def check_sizes(self) -> "RepetitionDetection":
        """Refuse sizes that can never match, and too many tokens to compare."""
        most, least, count = self.max_pattern_size or 0, self.min_pattern_size or 0, self.min_count or 0
        if least > most:
            raise ValueError("min_pattern_size must be at most max_pattern_size")
        if most and count < 2:
            raise ValueError("min_count must be at least 2")
        if most * count > MAX_REPEATED_TOKENS:
            raise ValueError(f"max_pattern_size times min_count must be at most {MAX_REPEATED_TOKENS}")
        return self

    @property
    def repetition(self) -> RepetitionStop | None:
        """Return what ends an answer; None if it is off."""
        if not self.max_pattern_size:
            return None
        return RepetitionStop(self.max_pattern_size, self.min_count or 0, self.min_pattern_size or 1)


def add_names(schema: dict[str, Any], model: type[WireRequest]) -> None:
    """Add the aliases to the JSON schema of a request."""
    schema["properties"] |= described_names(schema, aliases_of(model))


class Extensions(WireRequest):
    """Further fields of the requests that take the aliases of other servers: chat and completions.

    pydantic reads base classes from the last to the first, and a check sees only fields before its own. So
    requests are written `class ChatRequest(Extensions, Beams, Structured, Sampling)`.
    """

    model_config = ConfigDict(json_schema_extra=add_names)

    TAKES_ALIASES = True

    truncate_prompt_tokens: Annotated[int | None, Wire(shapes_prompt=True)] = Field(
        None, ge=-1, lt=2**31, description="keep at most N tokens of the prompt; -1: what fits"
    )
    truncation_side: Annotated[
        Literal["left", "right"] | None, Wire(neutral=("left",), shapes_prompt=True)
    ] = Field(None, description="where tokens are left out; default left: the last ones stay")

    repetition_stop: RepetitionOptions | None = Field(
        None, description="end the answer when its last tokens are one ngram several times in a row"
    )
    repetition_detection: RepetitionDetection | None = Field(
        None, description="end the answer when its last tokens are any short pattern several times in a row"
    )

    first_token_ids: list[int] | None = Field(
        None,
        min_length=1,
        fail_fast=True,
        description="the only tokens that the answer can begin with; default: all",
    )

    @field_validator("repetition_detection")
    @classmethod
    def check_one_stop(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse two kinds of repetition."""
        if value is not None and info.data.get("repetition_stop") is not None:
            raise ValueError("it cannot be used together with repetition_stop")
        return value

    @field_validator("repetition_stop", "repetition_detection", "first_token_ids")
    @classmethod
    def check_without_beams(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse fields that have no meaning for beams."""
        if value is not None and info.data.get("use_beam_search"):
            raise ValueError(NOT_WITH_BEAM_SEARCH)
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def check_truncation(cls, value: int | None) -> int | None:
        """Refuse to cut the whole prompt away."""
        if value == 0:
            raise ValueError("it must be at least 1, or -1")
        return value

    @field_validator("truncation_side")
    @classmethod
    def check_truncation_side(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Refuse the right side without a length; the left is the default."""
        if value == "right" and not info.data.get("truncate_prompt_tokens"):
            raise ValueError("it needs truncate_prompt_tokens")
        return value

    @property
    def repetition(self) -> RepetitionStop | None:
        """Return which repetition ends an answer; None if it is off."""
        if self.repetition_detection is not None:
            return self.repetition_detection.repetition
        options = self.repetition_stop
        return None if options is None else RepetitionStop(options.ngram, options.times)
