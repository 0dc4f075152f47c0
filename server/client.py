"""What commands need that talk to a server: its address, the key, the model."""

import os

from pydantic import BaseModel, ConfigDict, Field

API_KEY_VARIABLE = "MONOLOOP_API_KEY"


def default_api_key() -> str | None:
    """The (first) key of the server that runs with this environment."""
    return os.environ.get(API_KEY_VARIABLE, "").split(",")[0].strip() or None


class ClientSettings(BaseModel):
    """Which server to talk to."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    url: str = Field("http://127.0.0.1:8000", description="base URL of the server")
    api_key: str | None = Field(
        default_factory=default_api_key,
        description=f"key sent as a bearer token; default: {API_KEY_VARIABLE}",
    )
    model: str | None = Field(None, description="model to ask for; default: the first one the server lists")

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
