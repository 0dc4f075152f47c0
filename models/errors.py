"""Errors of models and checkpoints."""


class ModelError(Exception):
    """A model cannot be found, fetched, read or loaded. The message says which, and what to do about it."""


class FetchFailed(ModelError):
    """A model could not be fetched, though it may be there: no network, a broken download, a full disk."""
