"""POST /score, and LightLLM's POST /get_score: requests and responses."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema
from pydantic.functional_validators import PlainValidator

from server.schema.completions import MAX_PROMPTS, Prompt
from server.schema.inputs import InputsRequest
from server.schema.native import LightllmReason
from server.schema.refused_fields import Refused
from server.schema.sampling import Usage
from server.schema.tokenize import MULTIMODAL
from server.schema.wire import ModelRequest, WireResponse

PAIR = Refused((), "write both texts as one input, as the model expects them")
TEXTS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


def check_texts(value: Any) -> tuple[Prompt, ...]:
    """Return a text or a list of texts as a tuple. Raises ValueError."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a string or a list of strings")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise ValueError(f"must have 1 to {MAX_PROMPTS} strings, got {len(value)}")
    return tuple(value)


class ScoreRequest(InputsRequest):
    """Body of POST /score."""

    DIALECT = "score"
    REFUSED: ClassVar[Mapping[str, Refused]] = {
        **InputsRequest.REFUSED,
        "input_ids": Refused((), "send text as input"),
        "stream": Refused((False,), "scores come as a whole"),
        "text_1": PAIR,
        "text_2": PAIR,
        "queries": PAIR,
        "use_activation": Refused((False,), "scores are what the head computes"),
    }

    input: Annotated[tuple[Prompt, ...], PlainValidator(check_texts), WithJsonSchema(TEXTS_SCHEMA)]


# Of a reward model (one label), or one for each label of a classifier.
ScoreValue = float | list[float]


class Score(WireResponse):
    """The score of one input; of a model with several labels a list, in the order of the labels."""

    index: int
    object: Literal["score"] = "score"
    score: ScoreValue


class ScoreResponse(WireResponse):
    """Answer of POST /score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class GetScoreRequest(ModelRequest):
    """Body of POST /get_score."""

    DIALECT = "/get_score"
    REFUSES = "own"
    REFUSED: ClassVar[Mapping[str, Refused]] = {"multimodal_params": MULTIMODAL}

    chat: str = Field(description="a conversation, rendered as the model expects it")


class GetScoreResponse(WireResponse):
    """Answer of POST /get_score."""

    score: ScoreValue
    prompt_tokens: int
    finish_reason: LightllmReason
