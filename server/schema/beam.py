"""Fields of beam search, which chat and completions have in common."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from server.schema.refused_fields import is_neutral
from server.schema.wire import Finite, Wire, WireRequest, wire_of

MAX_BEST_OF = 20
NEEDS_BEAMS = "it needs use_beam_search"


class Beams(WireRequest):
    """Fields that search for the likeliest answers instead of drawing tokens."""

    use_beam_search: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None,
        description="search for the likeliest answers with max(n, best_of) beams; temperature, the filters "
        "and seed have no effect. Not in a stream",
    )
    length_penalty: Annotated[Finite | None, Wire(neutral=(1, 0))] = Field(
        None,
        ge=-10,
        le=10,
        description="beams are ranked by log-probability / length ** length_penalty; default 1",
    )
    early_stopping: Annotated[bool | Literal["never"] | None, Wire(neutral=(False,))] = Field(
        None,
        description="end the search as soon as there are as many answers as beams; default false: when no "
        "better one is likely; never: when none is possible",
    )
    best_of: Annotated[int | None, Wire(same_as="n")] = Field(
        None, ge=1, le=MAX_BEST_OF, description="beams to search with; without beam search it must equal n"
    )

    @field_validator("use_beam_search")
    @classmethod
    def check_beam_search(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        """Refuse a stream, where the best would come too late, and fields that change or cut beams."""
        if value and info.data.get("stream"):
            raise ValueError("the best answers are known only at the end: not in a stream")
        for name, wire in wire_of(cls).items() if value else ():
            given = info.data.get(name)
            if given and not (wire.with_beams or is_neutral(given, wire.neutral)):
                raise ValueError(f"it cannot be used together with {name}")
        return value

    @field_validator("length_penalty")
    @classmethod
    def check_length_penalty(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Refuse a value that ranks answers without a search; clients send the usual ones anyway."""
        if value not in (None, 0, 1) and not info.data.get("use_beam_search"):
            raise ValueError(NEEDS_BEAMS)
        return value

    @field_validator("early_stopping")
    @classmethod
    def check_early_stopping(cls, value: bool | str | None, info: ValidationInfo) -> bool | str | None:
        """Refuse early stopping without a search."""
        if value and not info.data.get("use_beam_search"):
            raise ValueError(NEEDS_BEAMS)
        return value

    @field_validator("best_of")
    @classmethod
    def check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse more candidates than answers where nothing chooses among them."""
        if value is not None and value != (info.data.get("n") or 1) and not info.data.get("use_beam_search"):
            raise ValueError("it must be left out or equal n, but for beam search")
        return value
