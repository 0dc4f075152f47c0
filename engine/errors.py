"""The errors that the engine raises.

EngineError
├── InvalidRequest            the request can never run; `param` names the field
│   └── ContextLengthExceeded prompt (and output) do not fit the context window
├── QueueFull                 the waiting queue is full; try again after `retry_after_seconds`
├── QueueTimeout              the request has not started in time: the engine is overloaded
├── RequestTimeout            the request has not ended in time
├── Draining                  the engine is shutting down and accepts no new requests
├── EngineDead                the step loop has ended; no request will finish
│   └── DeviceLost            because the device has failed for good
├── TemplateFault             the chat template has a fault: no request with it can run
├── StepFailed                the step of this request failed; the engine continues
└── ModelError                the model cannot be found or loaded (start-up only)
    ├── NotFetched            it has to be downloaded first
    └── FetchFailed           it could not be downloaded; trying again, or on another network, may help
"""


class EngineError(Exception):
    """Base class of the engine's errors. Messages are safe to show to a client."""


class InvalidRequest(EngineError):
    """The request can never run. `param` names the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt plus requested output, is longer than the context window."""


class QueueFull(EngineError):
    """The waiting queue is full. A client may try again after `retry_after_seconds`."""

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
    """The step loop has ended because of an unrecoverable error."""


class DeviceLost(EngineDead):
    """The device has an error that only a new process recovers from."""


class TemplateFault(EngineError):
    """The chat template fails on a conversation that it should render: not the client's fault."""


class StepFailed(EngineError):
    """The forward pass or the sampling of a step failed; all requests of the step end with this error."""


class ModelError(EngineError):
    """The model's files are missing, broken, of an unsupported kind, or cannot be downloaded."""


class NotFetched(ModelError):
    """The model has to be downloaded first."""


class FetchFailed(ModelError):
    """The model could not be downloaded, though it may exist: no network, a broken download, a full disk."""
