"""The errors that leave the engine.

EngineError
├── InvalidRequest            what was asked can never run; `param` names the field
│   └── ContextLengthExceeded prompt (and output) do not fit the context window
├── QueueFull                 the waiting queue is at its bound; come back after `retry_after_seconds`
├── QueueTimeout              it has not started in time: there is more work than time
├── RequestTimeout            it has not ended in the time it was given
├── Draining                  the engine finishes what it has and takes nothing new
├── EngineDead                the step loop has ended; nothing will ever finish
│   └── DeviceLost            because every use of the device fails from now on
├── StepFailed                the step this request was part of raised; the engine goes on
└── ModelError                the model cannot be found or loaded (start-up only)
    └── FetchFailed           it could not be fetched; trying again, or on another network, may help
"""


class EngineError(Exception):
    """Root of everything the engine raises on purpose. The message is safe to show to a client."""


class InvalidRequest(EngineError):
    """The request can never run. `param` is the name of the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt plus requested output, is longer than the context window."""


class QueueFull(EngineError):
    """Too many requests wait already. Trying again after `retry_after_seconds` is sensible."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueTimeout(EngineError):
    """The request has not started within its `queue_timeout_seconds`."""


class RequestTimeout(EngineError):
    """The request has not ended within its `timeout_seconds`."""


class Draining(EngineError):
    """The engine is shutting down: running requests finish, new ones are refused."""


class EngineDead(EngineError):
    """The step loop has ended because of a fault it cannot survive."""


class DeviceLost(EngineDead):
    """The device has met an error that it does not recover from within this process."""


class StepFailed(EngineError):
    """The forward pass or the sampling of a step raised; every request in that step ends with this."""


class ModelError(EngineError):
    """The model's files are missing, broken, of an unsupported kind, or cannot be fetched."""


class FetchFailed(ModelError):
    """The model could not be fetched, though it may be there: no network, a broken download, a full disk."""
