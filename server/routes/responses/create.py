"""POST /v1/responses, without state on the server."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.answer import Answer, collect_all
from server.context import ServerContext
from server.handler import answered
from server.routes.chat import submit
from server.routes.responses.convert import chat_request
from server.routes.responses.events import ResponseFrames
from server.routes.responses.items import begun, whole
from server.schema.responses import RESPONSES, ResponsesRequest
from server.stream import stream_answer


async def create_response(http: HttpRequest) -> Response:
    """One answer to a conversation, which the client sends whole."""
    return await answered(http, ResponsesRequest, RESPONSES, "resp_", reply)


async def reply(context: ServerContext, wire: ResponsesRequest, answer: Answer) -> Response:
    """Submit as a chat, and stream or collect."""
    started = asyncio.get_running_loop().time()
    chat = await asyncio.to_thread(chat_request, wire)
    try:
        await submit(context, chat, answer)
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = "input"
        raise
    response = begun(answer, wire, context.limits)
    if wire.stream:
        return stream_answer(context.config, ResponseFrames(answer, response), started)
    [delta] = await collect_all(answer.streams)
    body = whole(response, answer, delta)
    return Response(body.model_dump_json(), media_type="application/json")
