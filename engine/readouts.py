"""Readouts: what a request may ask of its prompt beside output tokens.

A readout reads the hidden states, after the final norm, of a range of the prompt's tokens, over as many steps
as the prompt takes. Tokens from the start of the range on are computed even if the prefix cache holds them.
A class here says what is asked for; its recipe in `engine/device/readouts.py` computes it.
"""

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Literal, Protocol

from engine.errors import InvalidRequest

MAX_LOGPROBS = 20

Pooling = Literal["mean", "last"]
Head = Literal["language model", "score"]


class Readout(Protocol):
    """A frozen dataclass: what is asked for. Its class selects the implementation on the device."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    head: ClassVar[Head | None]
    """The head of the model that it applies to hidden states, None for none."""

    comes_in_parts: ClassVar[bool]
    """True if each row returns the result of its own tokens, False if the last row returns the one result."""

    def positions(self, num_prompt_tokens: int) -> range:
        """Return the positions of the tokens whose hidden states it reads."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters out of range."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probability of every prompt token but the first, and of the `num_top` most likely ones there.

    `num_top` is 0 to MAX_LOGPROBS. Each row returns a PromptLogprobColumns.
    """

    num_top: int
    head: ClassVar[Head | None] = "language model"
    comes_in_parts: ClassVar[bool] = True

    def positions(self, num_prompt_tokens: int) -> range:
        return range(num_prompt_tokens - 1)

    def check(self) -> None:
        if not 0 <= self.num_top <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"'prompt_logprobs' must be between 0 and {MAX_LOGPROBS}.", "prompt_logprobs"
            )


@dataclass(frozen=True, slots=True)
class PooledHidden:
    """One vector of the prompt, fp32 [hidden_size]: the mean of its hidden states, or the last one."""

    pooling: Pooling
    head: ClassVar[Head | None] = None
    comes_in_parts: ClassVar[bool] = False

    def positions(self, num_prompt_tokens: int) -> range:
        return range(0 if self.pooling == "mean" else num_prompt_tokens - 1, num_prompt_tokens)

    def check(self) -> None:
        """Accept every value: the type allows no wrong one."""


@dataclass(frozen=True, slots=True)
class RewardScore:
    """The scores of the last token, fp32 [num_labels]: those of a reward model or a classifier."""

    head: ClassVar[Head | None] = "score"
    comes_in_parts: ClassVar[bool] = False

    def positions(self, num_prompt_tokens: int) -> range:
        return range(num_prompt_tokens - 1, num_prompt_tokens)

    def check(self) -> None:
        """Accept it: there are no parameters."""


READOUTS: dict[str, type[Readout]] = {
    kind.__name__: kind for kind in (PromptLogprobs, PooledHidden, RewardScore)
}
