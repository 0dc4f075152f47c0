"""The error envelopes: that of the OpenAI API, and those of the other dialects."""

from typing import Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """The error. `param` names the offending field, `code` is stable and for machines."""

    message: str = Field(description="for a person; names the field and the limit")
    type: str = Field(description="class of the error, such as invalid_request_error")
    param: str | None = Field(description="the offending field of the request")
    code: str | None = Field(description="such as context_length_exceeded or model_not_found")


class ErrorResponse(BaseModel):
    """Body of every answer with a status of 400 and above, and of the error event inside a stream."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """The error; the message names the offending field."""

    type: str = Field(description="class of the error, such as invalid_request_error")
    message: str


class AnthropicError(BaseModel):
    """Body of every error below /v1/messages, and of the error event inside a stream."""

    type: Literal["error"]
    error: AnthropicErrorDetail


NativeErrorType = Literal["validation", "overloaded", "generation"]


class NativeError(BaseModel):
    """Body of every error of the routes of TGI (error, error_type) and LightLLM (message)."""

    error: str
    error_type: NativeErrorType
    message: str = Field(description="equal to error")
