"""POST /abort and /abort_request (the names of LightLLM and SGLang): request and response."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from server.schema.wire import ModelRequest, Wire, WireResponse

Id = Annotated[str, Field(min_length=1, max_length=256)]


class AbortRequest(ModelRequest):
    """Body of POST /abort and /abort_request: the id of a request, or abort_all."""

    DIALECT = "/abort"
    REFUSES = "own"

    request_id: Id | int | None = Field(
        None,
        description="X-Request-Id of the request, id of its answer, or the request_id or rid of its body",
    )
    rid: Id | None = Field(None, description="SGLang's name of request_id")
    abort_all: Annotated[bool | None, Wire(neutral=(False,))] = Field(
        None, description="end every request of the API key; default false"
    )

    @property
    def wanted(self) -> str | None:
        """The id; None: every request."""
        name = self.rid if self.request_id is None else self.request_id
        return None if self.abort_all else str(name)

    @model_validator(mode="after")
    def check_wanted(self) -> Self:
        """Check that the body says what is to be ended."""
        if not self.abort_all and self.request_id is None and self.rid is None:
            raise ValueError("give the request_id of the request to end, or abort_all: true")
        return self


class AbortResponse(WireResponse):
    """How many requests are ended: 0 if none of the API key has the id (any more)."""

    aborted: int
