"""Fields of beam search, which chat and completions have in common."""

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from engine.request import BeamParams
from server.schema.sampling import Finite
from server.schema.structured import StructuredRequest

MAX_BEST_OF = 20
# What makes tokens more or less likely, or cuts an answer.
NOT_WITH_BEAMS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "bad_words_ids",
    "stop",
)


class BeamRequest(StructuredRequest):
    """Fields that search for the likeliest answers instead of drawing tokens."""

    NEEDS_BEAMS: ClassVar[str] = "it needs use_beam_search"

    use_beam_search: bool | None = Field(
        None,
        description="search for the likeliest answers with max(n, best_of) beams; temperature, the filters "
        "and seed have no effect. Not in a stream",
    )
    length_penalty: Finite | None = Field(
        None,
        ge=-10,
        le=10,
        description="beams are ranked by log-probability / length ** length_penalty; default 1",
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None,
        description="end the search as soon as there are as many answers as beams; default false: when no "
        "better one is likely; never: when none is possible",
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_BEST_OF, description="beams to search with; without beam search it must equal n"
    )

    @field_validator("use_beam_search")
    @classmethod
    def check_beam_search(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        """The best are known only at the end, and no token is drawn."""
        if value and info.data.get("stream"):
            raise ValueError("the best answers are known only at the end: not in a stream")
        for name in NOT_WITH_BEAMS if value else ():
            if info.data.get(name) not in (None, (), [], {}, 1.0 if name == "repetition_penalty" else 0.0):
                raise ValueError(f"it cannot be used together with {name}")
        return value

    @field_validator("length_penalty")
    @classmethod
    def check_length_penalty(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Without a search there is nothing to rank; clients send the usual values all the same."""
        if value not in (None, 0, 1) and not info.data.get("use_beam_search"):
            raise ValueError(cls.NEEDS_BEAMS)
        return value

    @field_validator("early_stopping")
    @classmethod
    def check_early_stopping(cls, value: bool | str | None, info: ValidationInfo) -> bool | str | None:
        """The same."""
        if value and not info.data.get("use_beam_search"):
            raise ValueError(cls.NEEDS_BEAMS)
        return value

    @field_validator("best_of")
    @classmethod
    def check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Where nothing chooses among more answers than are wanted."""
        if value is not None and value != (info.data.get("n") or 1) and not info.data.get("use_beam_search"):
            raise ValueError("it must be left out or equal n, but for beam search")
        return value

    @property
    def beams(self) -> BeamParams | None:
        """How to search, if that is what is asked for."""
        if not self.use_beam_search:
            return None
        return BeamParams(
            width=max(self.n or 1, self.best_of or 1),
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )
