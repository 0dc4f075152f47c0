"""Log-probabilities and token ids in answers, as chat and text completions spell them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def is_none(value: Any) -> bool:
    """For fields that stand in an answer only if they were asked for."""
    return value is None


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

    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(BaseModel):
    """A token in some place of a prompt, as vLLM describes it."""

    model_config = ConfigDict(frozen=True)

    logprob: float
    rank: int | None = Field(description="1 is the most likely token; null for one that is told beside these")
    decoded_token: str


# For each token of a prompt the most likely ones in its place and itself, by token id; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(BaseModel):
    """The tokens of an answer, or of a chunk's text, in parallel lists."""

    model_config = ConfigDict(frozen=True)

    text_offset: list[int] = Field(description="characters of the choice's text before each token")
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    tokens: list[str] = Field(description="bytes that are no whole character are written as bytes:\\xe2")
    top_logprobs: list[dict[str, float] | None] = Field(
        description="the most likely tokens in each place, and the one that stands there"
    )
