"""Settings of commands that talk to a server: its address, the key, the model."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from server.proxies import is_loopback

NO_SOCKS = (
    "the environment names a SOCKS proxy (ALL_PROXY), which needs the package socksio: pip install socksio"
)
API_KEY_VARIABLE = "MONOLOOP_API_KEY"


def default_api_key() -> str | None:
    """Return the (first) key of a server that runs with this environment."""
    return os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip() or None


def default_url() -> str:
    """Return the address of a server that runs with this environment."""
    port = os.environ.get("MONOLOOP_PORT", "")
    return f"http://127.0.0.1:{port if port.isdecimal() else 8000}"


class ClientSettings(BaseModel):
    """Which server to talk to."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    url: str = Field(
        default_factory=default_url,
        description="base URL of the server; default: http://127.0.0.1:8000, or the port of MONOLOOP_PORT",
    )
    api_key: str | None = Field(
        default_factory=default_api_key,
        description=f"key sent as a bearer token; default: {API_KEY_VARIABLE}",
    )
    model: str | None = Field(None, description="model to ask for; default: the first one the server lists")

    @field_validator("url")
    @classmethod
    def cut(cls, url: str) -> str:
        """Return the URL without the `/v1` that other clients want at its end."""
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def http_options(self) -> dict[str, Any]:
        """Return the arguments of an httpx client; a server on this machine is asked without a proxy."""
        return {"headers": self.headers, "trust_env": not is_loopback(self.url)}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
