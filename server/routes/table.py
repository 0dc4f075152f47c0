"""The list of all endpoints: what the application routes and what /openapi.json describes."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.routes import chat, completions, models, state
from server.schema.chat import ChatChunk, ChatRequest, ChatResponse
from server.schema.completions import CompletionChunk, CompletionRequest, CompletionResponse
from server.schema.models import Load, ModelCard, ModelList, Version


class Endpoint(NamedTuple):
    """One route. `response` None is an empty or a text body; `chunk` is one event of the stream."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    response: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat.chat_completions, ChatResponse, ChatRequest, ChatChunk),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.completions,
        CompletionResponse,
        CompletionRequest,
        CompletionChunk,
    ),
    Endpoint("GET", "/v1/models", models.list_models, ModelList),
    Endpoint("GET", "/v1/models/{model:path}", models.get_model, ModelCard),
    Endpoint("GET", "/health", state.health),
    Endpoint("GET", "/ready", state.ready),
    Endpoint("GET", "/version", state.version, Version),
    Endpoint("GET", "/load", state.load, Load),
    Endpoint("GET", "/metrics", state.metrics),
)
