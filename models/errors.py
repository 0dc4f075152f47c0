"""Errors of models and checkpoints."""

_END_CHARS = 1000


class ModelError(Exception):
    """A model cannot be found, fetched, read or loaded. The message says which, and what to do about it.

    It may quote a model's files: it is one line of bounded length, with control characters escaped.
    """

    def __init__(self, message: str) -> None:
        if len(message) > 2 * _END_CHARS:
            message = f"{message[:_END_CHARS]}…{message[-_END_CHARS:]}"
        super().__init__("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message))


class FetchFailed(ModelError):
    """A model could not be fetched, though it may be there: no network, a broken download, a full disk."""
