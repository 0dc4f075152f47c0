"""POST /v1/responses, without state on the server."""

import asyncio

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.answer import Answer, render
from server.context import ServerContext
from server.convert import token_details
from server.endpoint import Endpoint, run_generation
from server.errors import renamed_fields
from server.parsing.answer_format import AnswerFormat
from server.parsing.tool_choice import is_forced
from server.routes.openai.chat import submit
from server.routes.responses.convert import NAMES, chat_request
from server.routes.responses.events import ResponseFrames
from server.routes.responses.items import begun, whole
from server.schema.refused_fields import UnsupportedField
from server.schema.response_events import ResponseEvent
from server.schema.responses import LOGPROBS_INCLUDED, ResponseObject, ResponsesRequest
from server.stream import stream_answer


async def create_response(http: HttpRequest) -> Response:
    """One answer to a conversation, which the client sends whole."""
    return await run_generation(http, ResponsesRequest, "resp_", reply)


async def reply(context: ServerContext, wire: ResponsesRequest, answer: Answer) -> Response:
    """Submit as a chat, and stream or collect."""
    chat = await asyncio.to_thread(chat_request, wire)
    if wire.wants_logprobs and AnswerFormat.of(chat, context.formats):
        raise UnsupportedField(
            f"{LOGPROBS_INCLUDED} is not available where tools may be called or the model reasons.", "include"
        )
    with renamed_fields(NAMES):
        await submit(context, chat, answer)
    response, details = begun(answer, wire, context.limits), token_details(chat)
    is_call = is_forced(chat.tool_choice)
    if wire.stream:
        frames = ResponseFrames(answer, response, details, is_call=is_call)
        return stream_answer(context.config, frames)
    [delta] = await answer.collect()
    return await render(
        lambda: whole(response, answer, delta, details, is_call=is_call).model_dump_json(), [delta]
    )


ENDPOINT = Endpoint(
    "POST",
    ("/v1/responses",),
    create_response,
    ResponseObject,
    ResponsesRequest,
    ResponseEvent,
    example={"input": "Hello!"},
)
