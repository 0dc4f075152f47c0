"""What this floor raises on purpose."""


class ModelError(Exception):
    """A model cannot be found, fetched, read or loaded. The message says which, and what to do about it."""
