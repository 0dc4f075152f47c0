"""Roots of request and response bodies, and `Wire`: metadata of a request's field beside its type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from server.schema.refused_fields import Refused

Finite = Annotated[float, Field(allow_inf_nan=False)]
Needed = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Wire:
    """Metadata of a request's field, written into its `Annotated` type.

    `neutral` are the values that leave an answer as it is: requests that do not have the field accept them.
    `same_as` names a field of the same body whose value is neutral, too. `aliases` are the field's names in
    the APIs of other servers. `shapes_prompt` says that the field can change the tokens of a prompt,
    `with_beams` that it can be used together with beam search.
    """

    neutral: tuple[Any, ...] = ()
    same_as: str | None = None
    aliases: tuple[str, ...] = ()
    shapes_prompt: bool = False
    with_beams: bool = True


NO_METADATA = Wire()


class WireRequest(BaseModel):
    """Root of request bodies. Strict: a bool is no int and "5" is no number. Unknown fields are tolerated.

    The class variables say how the fields of other requests are treated, see `dialects`: `DIALECT` is the
    name of the request in hints, `REFUSED` the fields it refuses in its own words, `HINT` what is said about
    all others (by default, which requests have them). `REFUSES` says which fields of others are refused: all,
    those that shape a prompt, or only `REFUSED`. `NESTED` names fields that hold a request of their own.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    DIALECT: ClassVar[str] = ""
    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    HINT: ClassVar[str] = ""
    REFUSES: ClassVar[Literal["all", "prompt", "own"]] = "all"
    NESTED: ClassVar[Mapping[str, "type[WireRequest]"]] = {}
    TAKES_ALIASES: ClassVar[bool] = False


class ModelRequest(WireRequest):
    """Root of the bodies of endpoints, which all may name the model."""

    model: str | None = Field(
        None, max_length=512, description="name from /v1/models; may be left out as one model is served"
    )


class WireResponse(BaseModel):
    """Root of response bodies."""

    model_config = ConfigDict(frozen=True)


class TypedRequest(WireRequest):
    """An object whose `type`, its first field, says which of the others there must be."""

    model_config = ConfigDict(validate_default=True)

    NEEDED: ClassVar[Needed] = {}

    @field_validator("*")
    @classmethod
    def check_needed(cls, value: Any, info: ValidationInfo) -> Any:
        """Check that the fields which the type needs are there."""
        kind = info.data.get("type", "")
        if value is None and info.field_name in cls.NEEDED.get(kind, ()):
            raise PydanticCustomError("missing", f"the type {kind!r} needs it")
        return value


def wire_of(request: type[WireRequest]) -> dict[str, Wire]:
    """Return the metadata of each field of a request."""
    return {
        name: next((data for data in field.metadata if isinstance(data, Wire)), NO_METADATA)
        for name, field in request.model_fields.items()
    }


def check_entries(limit: int) -> BeforeValidator:
    """Return a validator that refuses an object with too many entries before it looks at each of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} entries are allowed, got {len(value)}")
        return value

    return BeforeValidator(check)
