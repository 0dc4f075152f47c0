"""POST /get_score, as in LightLLM."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.readouts import RewardScore
from server.answer import Answer, finish_of
from server.context import ServerContext
from server.endpoint import Endpoint, run_generation
from server.errors import NATIVE
from server.routes.openai.inputs import compute
from server.routes.openai.score import score_of
from server.schema.score import GetScoreRequest, GetScoreResponse, ScoreRequest


async def get_score(http: HttpRequest) -> Response:
    """Return what the model's score head computes for a conversation."""
    return await run_generation(http, GetScoreRequest, "score-", reply)


async def reply(context: ServerContext, wire: GetScoreRequest, answer: Answer) -> Response:
    """Compute the score, and write it."""
    request = ScoreRequest.model_validate({"input": wire.chat})
    [delta] = await compute(context, request, answer, RewardScore(), param="chat")
    [stream] = answer.streams
    body = GetScoreResponse(
        score=score_of(stream), prompt_tokens=stream.num_prompt_tokens, finish_reason=finish_of(delta)
    )
    return Response(body.model_dump_json(), media_type="application/json")


ENDPOINT = Endpoint(
    "POST",
    ("/get_score",),
    get_score,
    GetScoreResponse,
    GetScoreRequest,
    envelope=NATIVE,
    example={"chat": "Hello!"},
)
