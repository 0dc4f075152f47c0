"""Settings of commands that talk to a server: its address, the key, the model."""

import os
from collections.abc import Callable
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from server.flags import SettingsError
from server.healthcheck import address
from server.proxies import is_loopback

NO_SOCKS = (
    "the environment names a SOCKS proxy (ALL_PROXY), which needs the package socksio: pip install socksio"
)
API_KEY_VARIABLE = "MONOLOOP_API_KEY"


def default_api_key() -> str | None:
    """Return the (first) key of a server that runs with this environment."""
    return os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip() or None


def default_url() -> str:
    """Return the address of a server that runs with this environment. Raises SettingsError."""
    try:
        return address((), os.environ)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"MONOLOOP_CONFIG: cannot be read: {' '.join(str(error).split())}") from None


class ClientSettings(BaseModel):
    """Which server to talk to."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    url: str = Field(
        default_factory=default_url,
        description="base URL of the server, or unix:PATH; default: http://127.0.0.1:8000, or as MONOLOOP_* "
        "or the file of MONOLOOP_CONFIG set it",
    )
    api_key: str | None = Field(
        default_factory=default_api_key,
        description=f"key sent as a bearer token; default: {API_KEY_VARIABLE}",
    )
    model: str | None = Field(None, description="model to ask for; default: the first one the server lists")

    @field_validator("url")
    @classmethod
    def cut(cls, url: str) -> str:
        """Return the URL with a scheme, and without the `/v1` that other clients want at its end."""
        if url.startswith("unix:"):
            return url
        url = url if "://" in url else f"http://{url}"
        return url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def socket_path(self) -> str | None:
        """Return the path of the server's unix socket, if it has one."""
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else None

    def http_options(self, transport: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of an httpx client, the kind of whose transports is given.

        A server on this machine is asked without a proxy, and its certificate, which is for another name than
        that of the machine itself, is not checked.
        """
        if path := self.socket_path:
            return {
                "base_url": "http://localhost",
                "headers": self.headers,
                "transport": transport(uds=path),
                "trust_env": False,
            }
        is_remote = not is_loopback(self.url)
        return {
            "base_url": self.url,
            "headers": self.headers,
            "trust_env": is_remote,
            "verify": is_remote,
        }

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
