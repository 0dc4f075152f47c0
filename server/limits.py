"""Limits of a request to the served model: lengths, token ids, number of answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from engine import ModelInfo

MAX_ANSWERS = 1024


class Limits(NamedTuple):
    """Limits of the served model and engine, and the defaults the model ships with."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_queued: int
    generation_defaults: dict[str, Any]
    has_priorities: bool

    @classmethod
    def of(cls, model: "ModelInfo", config: EngineConfig) -> "Limits":
        """Return the limits; an idle engine starts max_num_seqs requests and lets max_waiting wait."""
        return cls(
            model.max_model_len,
            model.vocab_size,
            config.max_num_seqs,
            config.max_num_seqs + config.max_waiting,
            model.generation_defaults,
            config.priority_seconds > 0,
        )


def room_after(num_tokens: int, limits: Limits, param: str) -> int:
    """Return the room after the tokens of the field `param`. Raises InvalidRequest, ContextLengthExceeded."""
    if not num_tokens:
        raise InvalidRequest(f"{param} has no tokens.", param)
    if num_tokens > limits.max_model_len:
        raise overflow(limits, f"there are {num_tokens} tokens in your {param}", param)
    return limits.max_model_len - num_tokens


def max_answers(limits: Limits) -> int:
    """Return how many answers can be submitted at once to an idle server."""
    return min(MAX_ANSWERS, limits.max_queued)


def check_num_answers(count: int, limits: Limits, param: str) -> None:
    """Refuse more answers than the queue of an idle server holds. Raises InvalidRequest."""
    most = max_answers(limits)
    if count > most:
        raise InvalidRequest(f"{param} asks for {count} answers; this server queues at most {most}.", param)


def check_ids(token_ids: Sequence[int], param: str, limits: Limits) -> None:
    """Refuse ids outside the vocabulary: they would read or write another row. Raises InvalidRequest."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} in {param} is out of range: ids go from 0 to {limits.vocab_size - 1}.",
                param,
            )


def check_text(text: str, param: str) -> None:
    """Refuse NUL characters: text after one is lost in C strings. Raises InvalidRequest."""
    if "\0" in text:
        raise InvalidRequest(f"{param} must not contain NUL characters.", param)


def overflow(limits: Limits, what: str, param: str) -> ContextLengthExceeded:
    """Return the error for a prompt that is too long; clients find it by the beginning of its message."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, {what}. "
        "Please reduce the length of the prompt or of the completion.",
        param,
    )
