"""Text to token ids and back, as the served model does it; nothing is generated."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.context import ServerContext, context_of
from server.endpoint import Endpoint, run_plain
from server.errors import NATIVE
from server.limits import check_ids
from server.prompt import encode_chat, encode_prompt
from server.schema.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    TokensRequest,
    TokensResponse,
)

# Serializing this many ids takes 20 ms of the loop.
MAX_TOKENS = 2**19


async def tokenize(http: HttpRequest) -> Response:
    """Token ids of a prompt, or of a chat as the model's template renders it."""
    return await run_plain(http, TokenizeRequest, tokenize_reply)


async def tokenize_reply(context: ServerContext, wire: TokenizeRequest) -> Response:
    """Encode, and list."""
    tokenizer, limits = context.engine.tokenizer, context.limits
    if wire.prompt is None:
        ids = await encode_chat(wire.chat, tokenizer, limits, context.formats)
    else:
        special = wire.add_special_tokens is not False
        ids = await encode_prompt(wire.prompt, tokenizer, limits, add_special_tokens=special, param="prompt")
    if len(ids) > MAX_TOKENS:
        raise InvalidRequest(
            f"There are {len(ids)} tokens; {MAX_TOKENS} are listed at most, and POST /tokens counts more.",
            "messages" if wire.prompt is None else "prompt",
        )
    names = await tokenizer.token_strs(ids) if wire.return_token_strs else None
    body = TokenizeResponse.model_construct(
        count=len(ids), max_model_len=limits.max_model_len, tokens=ids, token_strs=names
    )
    return Response(body.model_dump_json(exclude_none=True), media_type="application/json")


async def detokenize(http: HttpRequest) -> Response:
    """Text of token ids, special tokens included."""
    return await run_plain(http, DetokenizeRequest, detokenize_reply)


async def detokenize_reply(context: ServerContext, wire: DetokenizeRequest) -> Response:
    """Check, and decode."""
    limits = context.limits
    if len(wire.tokens) > limits.max_model_len:
        raise InvalidRequest(
            f"tokens has {len(wire.tokens)} ids; a context of this model holds {limits.max_model_len}.",
            "tokens",
        )
    check_ids(wire.tokens, "tokens", limits)
    text = await context.engine.tokenizer.decode(wire.tokens, skip_special_tokens=False)
    return Response(DetokenizeResponse(prompt=text).model_dump_json(), media_type="application/json")


async def tokenizer_info(http: HttpRequest) -> Response:
    """Special tokens and chat template, for clients that tokenize or render by themselves."""
    engine = context_of(http).engine
    tokenizer = engine.tokenizer
    body = TokenizerInfo(
        **tokenizer.special_tokens,
        chat_template=tokenizer.chat_template,
        vocab_size=engine.model.vocab_size,
        model_max_length=engine.model.max_model_len,
    )
    return Response(body.model_dump_json(), media_type="application/json")


async def tokens(http: HttpRequest) -> Response:
    """Number of tokens of a text."""
    return await run_plain(http, TokensRequest, tokens_reply)


async def tokens_reply(context: ServerContext, wire: TokensRequest) -> Response:
    """Encode, and count."""
    special = (wire.parameters or {}).get("add_special_tokens") is not False
    ids = await encode_prompt(
        wire.text, context.engine.tokenizer, context.limits, add_special_tokens=special, param="text"
    )
    return Response(TokensResponse(ntokens=len(ids)).model_dump_json(), media_type="application/json")


ENDPOINTS = (
    Endpoint(
        "POST",
        ("/tokenize", "/v1/tokenize"),
        tokenize,
        TokenizeResponse,
        TokenizeRequest,
        example={"prompt": "Hello!"},
    ),
    Endpoint(
        "POST",
        ("/detokenize", "/v1/detokenize"),
        detokenize,
        DetokenizeResponse,
        DetokenizeRequest,
        example={"tokens": [72, 105, 33]},
    ),
    Endpoint("GET", ("/tokenizer_info",), tokenizer_info, TokenizerInfo),
    Endpoint(
        "POST",
        ("/tokens",),
        tokens,
        TokensResponse,
        TokensRequest,
        envelope=NATIVE,
        example={"text": "Hello!"},
    ),
)
