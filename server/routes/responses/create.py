"""POST /v1/responses, without state on the server."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.answer import Answer, collect_all, render
from server.context import ServerContext
from server.convert import token_details
from server.endpoint import run_generation
from server.parsing.answer_format import AnswerFormat
from server.routes.openai.chat import submit
from server.routes.responses.convert import chat_request
from server.routes.responses.events import ResponseFrames
from server.routes.responses.items import begun, whole
from server.schema.dialects import RESPONSES
from server.schema.refused_fields import UnsupportedField
from server.schema.responses import LOGPROBS_INCLUDED, ResponsesRequest
from server.stream import stream_answer


async def create_response(http: HttpRequest) -> Response:
    """One answer to a conversation, which the client sends whole."""
    return await run_generation(http, ResponsesRequest, RESPONSES, "resp_", reply)


async def reply(context: ServerContext, wire: ResponsesRequest, answer: Answer) -> Response:
    """Submit as a chat, and stream or collect."""
    started = asyncio.get_running_loop().time()
    chat = await asyncio.to_thread(chat_request, wire)
    if wire.tells_logprobs and AnswerFormat.of(chat, context.formats, context.engine.tokenizer.chat_template):
        raise UnsupportedField(
            f"{LOGPROBS_INCLUDED} is not available where tools may be called or the model reasons.", "include"
        )
    try:
        await submit(context, chat, answer)
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = "input"
        raise
    response, details = begun(answer, wire, context.limits), token_details(chat)
    if wire.stream:
        return stream_answer(context.config, ResponseFrames(answer, response, details), started)
    [delta] = await collect_all(answer.streams)
    return await render(lambda: whole(response, answer, delta, details).model_dump_json(), [delta])
