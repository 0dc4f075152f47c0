"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API, without its server-side tools."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer
from server.context import ServerContext
from server.endpoint import Endpoint, run_generation, run_plain
from server.errors import ANTHROPIC, renamed_fields
from server.prompt import encode_chat
from server.routes.anthropic.convert import chat_request
from server.routes.anthropic.events import MessageFrames, whole_message
from server.routes.openai.chat import submit
from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.message_events import CountTokensResponse, Message, MessageEvent
from server.stream import stream_answer


async def messages(http: HttpRequest) -> Response:
    """One answer to a conversation."""
    return await run_generation(http, MessagesRequest, "msg_", reply)


async def reply(context: ServerContext, wire: MessagesRequest, answer: Answer) -> Response:
    """Submit as a chat, and stream or collect."""
    chat = await asyncio.to_thread(chat_request, wire)
    names = {"response_format": "output_format" if wire.output_format else "output_config.format"}
    with renamed_fields(names):
        await submit(context, chat, answer, default_max_tokens=wire.max_tokens)
    if wire.stream:
        return stream_answer(context.config, MessageFrames(answer, wire.max_tokens))
    [delta] = await answer.collect()
    body = whole_message(answer, delta, wire.max_tokens)
    return Response(body.model_dump_json(), media_type="application/json")


async def count_tokens(http: HttpRequest) -> Response:
    """Number of tokens of a conversation's prompt; nothing is generated."""
    return await run_plain(http, CountTokensRequest, count_reply)


async def count_reply(context: ServerContext, wire: CountTokensRequest) -> Response:
    """Encode as a chat, and count."""
    chat = await asyncio.to_thread(chat_request, wire)
    ids = await encode_chat(chat, context.engine.tokenizer, context.limits, context.formats)
    return Response(
        CountTokensResponse(input_tokens=len(ids)).model_dump_json(), media_type="application/json"
    )


HELLO = [{"role": "user", "content": "Hello!"}]
ENDPOINTS = (
    Endpoint(
        "POST",
        ("/v1/messages",),
        messages,
        Message,
        MessagesRequest,
        MessageEvent,
        ANTHROPIC,
        example={"max_tokens": 100, "messages": HELLO},
    ),
    Endpoint(
        "POST",
        ("/v1/messages/count_tokens",),
        count_tokens,
        CountTokensResponse,
        CountTokensRequest,
        envelope=ANTHROPIC,
        example={"messages": HELLO},
    ),
)
