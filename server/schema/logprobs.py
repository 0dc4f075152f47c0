"""Log-probabilities and token ids in answers, as chat and text completions spell them."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

T = TypeVar("T")


def is_none(value: Any) -> bool:
    """Leave out fields that were not requested."""
    return value is None


def one_by_one(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with a step of Python for each."""
    for item in items:  # noqa: UP028 - `yield from` would leave Python out
        yield item


def in_turns(kind: Any) -> PlainSerializer:
    """Return a serializer for long lists of `kind`: pydantic holds the GIL as long as it meets no Python.

    For an answer of 20,000 tokens with 20 likeliest ones each, that is half a second, in whichever thread.
    """
    return PlainSerializer(one_by_one, return_type=Iterable[kind], when_used="json")


class TopLogprob(BaseModel):
    """One of the most likely tokens in a place."""

    model_config = ConfigDict(frozen=True)

    token: str = Field(description="its text; bytes that are no whole character are written as \\xe2")
    logprob: float = Field(description="of the raw logits, before temperature, penalties and bias; ≥ -9999")
    bytes: list[int] = Field(description="its bytes: joined, those of all tokens are the text in UTF-8")


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most likely ones in its place, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The tokens of an answer, or of a chunk's text."""

    model_config = ConfigDict(frozen=True)

    content: Annotated[list[TokenLogprob], in_turns(TokenLogprob)]
    refusal: None


class PromptLogprob(BaseModel):
    """A token in some place of a prompt, as vLLM describes it."""

    model_config = ConfigDict(frozen=True)

    logprob: float
    rank: int = Field(description="1 is the most likely token")
    decoded_token: str


# For each token of a prompt the most likely ones in its place and itself, by token id; null for the first.
PromptPlace = dict[str, PromptLogprob] | None
PromptLogprobs = Annotated[list[PromptPlace], in_turns(PromptPlace)]


Place = dict[str, float] | None


class CompletionLogprobs(BaseModel):
    """The tokens of an answer, or of a chunk's text, in parallel lists."""

    model_config = ConfigDict(frozen=True)

    text_offset: list[int] = Field(description="characters of the choice's text before each token")
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    tokens: list[str] = Field(description="bytes that are no whole character are written as bytes:\\xe2")
    top_logprobs: Annotated[list[Place], in_turns(Place)] = Field(
        description="the top tokens at each position, and the actual one"
    )
