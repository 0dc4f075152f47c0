"""The error envelope of the OpenAI API."""

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong. `param` names the offending field, `code` is stable and for machines."""

    message: str = Field(description="for a person; names the field and the limit")
    type: str = Field(description="class of the error, such as invalid_request_error")
    param: str | None = Field(description="the offending field of the request")
    code: str | None = Field(description="such as context_length_exceeded or model_not_found")


class ErrorResponse(BaseModel):
    """Body of every answer with a status of 400 and above, and of the error event inside a stream."""

    error: ErrorDetail
