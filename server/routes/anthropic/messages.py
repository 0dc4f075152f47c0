"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API, without its server-side tools."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, collect_all, while_connected
from server.body import read_json
from server.context import ServerContext, context_of
from server.handler import answered
from server.prompt import encode_chat
from server.routes.anthropic.convert import chat_request
from server.routes.anthropic.events import MessageFrames, message
from server.routes.chat import submit
from server.schema.anthropic import (
    MESSAGES,
    PROMPT_ONLY,
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
)
from server.schema.fields import unknown_fields
from server.stream import stream_answer


async def messages(http: HttpRequest) -> Response:
    """One answer to a conversation."""
    return await answered(http, MessagesRequest, MESSAGES, "msg_", reply)


async def reply(context: ServerContext, wire: MessagesRequest, answer: Answer) -> Response:
    """Submit as a chat, and stream or collect."""
    started = asyncio.get_running_loop().time()
    chat = await asyncio.to_thread(chat_request, wire)
    await submit(context, chat, answer, default_max_tokens=wire.max_tokens)
    if wire.stream:
        return stream_answer(context.config, MessageFrames(answer, wire.max_tokens), started)
    [delta] = await collect_all(answer.streams)
    body = message(answer, delta, wire.max_tokens)
    return Response(body.model_dump_json(), media_type="application/json")


async def count_tokens(http: HttpRequest) -> Response:
    """Number of tokens of a conversation's prompt; nothing is generated."""
    context = context_of(http)
    wire = await read_json(http, CountTokensRequest, PROMPT_ONLY)
    context.model_name(wire.model)
    context.note_unknown_fields(unknown_fields(wire.model_extra, PROMPT_ONLY))

    async def work() -> Response:
        chat = await asyncio.to_thread(chat_request, wire)
        ids = await encode_chat(chat, context.engine.tokenizer, context.limits)
        body = CountTokensResponse(input_tokens=len(ids))
        return Response(body.model_dump_json(), media_type="application/json")

    return await while_connected(http, context.config.request_timeout_seconds, work)
