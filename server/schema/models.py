"""GET /v1/models, and the small answers about the server itself."""

from typing import Literal

from pydantic import Field

from server.schema.wire import WireResponse


class ModelCard(WireResponse):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="unix time the server loaded the model")
    owned_by: str = "monoloop"
    root: str
    parent: None = None
    max_model_len: int = Field(description="longest prompt plus output, in tokens")
    permission: list[None] = Field(default_factory=list, max_length=0)


class ModelList(WireResponse):
    """All names the served model answers to."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(WireResponse):
    """Version of monoloop."""

    version: str


class ProfileFile(WireResponse):
    """A profile that was written."""

    path: str = Field(description="the file on the server, in Chrome's trace format")


class ModelName(WireResponse):
    """Name of the served model, as LightLLM gives it."""

    model_name: str


class TokenLoad(WireResponse):
    """Shares of the KV cache in use, as LightLLM gives them: 1 is all of it."""

    current_load: float = Field(description="share of the pages that requests hold")
    logical_max_load: float = Field(
        description="share that those that run are expected to hold at most; may be above 1"
    )
    dynamic_max_load: float = Field(description="equal to logical_max_load")


class Load(WireResponse):
    """The load of the server, for load balancers."""

    server_load: int = Field(description="requests running and waiting")
    running: int
    waiting: int
    kv_cache_usage: float = Field(description="share of KV pages that requests hold, 0 to 1")
    predicted_kv_cache_usage: float = Field(
        description="kv_cache_usage at its expected peak, if nothing else starts; may be above 1"
    )
    pages_used: int
    pages_cached: int
    pages_free: int
