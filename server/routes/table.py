"""The list of all endpoints: what the application routes and what /openapi.json describes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from server.routes import status, tokenize
from server.routes.anthropic import messages
from server.routes.native import generate
from server.routes.openai import chat, completions, embeddings, models
from server.routes.responses import create
from server.schema.anthropic import (
    CountTokensRequest,
    CountTokensResponse,
    Message,
    MessageEvent,
    MessagesRequest,
)
from server.schema.chat import ChatChunk, ChatRequest, ChatResponse
from server.schema.completions import CompletionChunk, CompletionRequest, CompletionResponse
from server.schema.dialects import CHAT, COMPLETION, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES, TOKENIZE
from server.schema.embeddings import EmbeddingsRequest, EmbeddingsResponse
from server.schema.errors import AnthropicError, ErrorResponse, NativeError
from server.schema.models import Load, ModelCard, ModelList, ModelName, TokenLoad, Version
from server.schema.native import GENERATE, GenerateEvent, GenerateRequest, GenerateResponse
from server.schema.refused_fields import Refused
from server.schema.response_events import ResponseEvent
from server.schema.responses import ResponseObject, ResponsesRequest
from server.schema.tokenize import (
    REFUSED_TOKENS,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    TokensRequest,
    TokensResponse,
)


class Endpoint(NamedTuple):
    """One handler at one path or several, the first of which names it in metrics.

    `response` None is an empty or a text body; `chunk` is one event of the stream; `refused` the fields of
    the request that are known and do not act; `example` a request that is answered.
    """

    method: str
    paths: tuple[str, ...]
    handler: Callable[[Request], Awaitable[Response]]
    response: type[BaseModel] | None = None
    request: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    refused: Mapping[str, Refused] = {}
    error: type[BaseModel] = ErrorResponse
    example: Mapping[str, Any] | None = None


HELLO = [{"role": "user", "content": "Hello!"}]

ENDPOINTS = (
    Endpoint(
        "POST",
        ("/v1/chat/completions",),
        chat.chat_completions,
        ChatResponse,
        ChatRequest,
        ChatChunk,
        CHAT,
        example={"messages": HELLO},
    ),
    Endpoint(
        "POST",
        ("/v1/completions",),
        completions.completions,
        CompletionResponse,
        CompletionRequest,
        CompletionChunk,
        COMPLETION,
        example={"prompt": "Once upon a time", "max_tokens": 16},
    ),
    Endpoint(
        "POST",
        ("/v1/embeddings",),
        embeddings.embeddings,
        EmbeddingsResponse,
        EmbeddingsRequest,
        refused=EMBEDDINGS,
        example={"input": "Hello!"},
    ),
    Endpoint(
        "POST",
        ("/v1/responses",),
        create.create_response,
        ResponseObject,
        ResponsesRequest,
        ResponseEvent,
        RESPONSES,
        example={"input": "Hello!"},
    ),
    Endpoint(
        "POST",
        ("/v1/messages",),
        messages.messages,
        Message,
        MessagesRequest,
        MessageEvent,
        MESSAGES,
        AnthropicError,
        {"max_tokens": 100, "messages": HELLO},
    ),
    Endpoint(
        "POST",
        ("/v1/messages/count_tokens",),
        messages.count_tokens,
        CountTokensResponse,
        CountTokensRequest,
        refused=COUNT_TOKENS,
        error=AnthropicError,
        example={"messages": HELLO},
    ),
    Endpoint(
        "POST",
        ("/tokenize", "/v1/tokenize"),
        tokenize.tokenize,
        TokenizeResponse,
        TokenizeRequest,
        refused=TOKENIZE,
        example={"prompt": "Hello!"},
    ),
    Endpoint(
        "POST",
        ("/detokenize", "/v1/detokenize"),
        tokenize.detokenize,
        DetokenizeResponse,
        DetokenizeRequest,
        example={"tokens": [72, 105, 33]},
    ),
    Endpoint("GET", ("/tokenizer_info",), tokenize.tokenizer_info, TokenizerInfo),
    *(
        Endpoint(
            "POST",
            (path,),
            handler,
            GenerateResponse,
            GenerateRequest,
            GenerateEvent,
            GENERATE,
            NativeError,
            {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 16}},
        )
        for path, handler in (
            ("/generate", generate.generate),
            ("/generate_stream", generate.generate_stream),
            ("/", generate.generate_compat),
        )
    ),
    Endpoint(
        "POST",
        ("/tokens",),
        tokenize.tokens,
        TokensResponse,
        TokensRequest,
        refused=REFUSED_TOKENS,
        error=NativeError,
        example={"text": "Hello!"},
    ),
    Endpoint("GET", ("/v1/models",), models.list_models, ModelList),
    Endpoint("GET", ("/v1/models/{model:path}",), models.get_model, ModelCard),
    Endpoint("GET", ("/get_model_name",), models.get_model_name, ModelName),
    Endpoint("POST", ("/get_model_name",), models.get_model_name, ModelName),
    Endpoint("GET", ("/health", "/healthz", "/liveness"), status.health),
    Endpoint("GET", ("/ready", "/readiness"), status.ready),
    Endpoint("GET", ("/version",), status.version, Version),
    Endpoint("GET", ("/load",), status.load, Load),
    Endpoint("GET", ("/token_load",), status.token_load, TokenLoad),
    Endpoint("GET", ("/metrics",), status.metrics),
)
