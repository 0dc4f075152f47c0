"""POST /score."""

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.readouts import RewardScore
from server.answer import Answer
from server.context import ServerContext
from server.endpoint import Endpoint, run_generation
from server.parsing.output import ParsedStream
from server.routes.openai.inputs import compute, finite_readout
from server.schema.score import Score, ScoreRequest, ScoreResponse, ScoreValue

if TYPE_CHECKING:
    from engine import RequestStream


async def score(http: HttpRequest) -> Response:
    """Return what the model's score head computes for each input."""
    return await run_generation(http, ScoreRequest, "score-", reply)


async def reply(context: ServerContext, wire: ScoreRequest, answer: Answer) -> Response:
    """Compute the scores, and write them."""
    await compute(context, wire, answer, RewardScore())
    body = ScoreResponse(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        data=[Score(index=index, score=score_of(stream)) for index, stream in enumerate(answer.streams)],
        usage=answer.usage(),
    )
    return Response(body.model_dump_json(), media_type="application/json")


def score_of(stream: "RequestStream | ParsedStream") -> ScoreValue:
    """Return the score of an input, or the list of its scores if there are several labels."""
    scores: list[float] = finite_readout(stream, RewardScore).tolist()
    return scores[0] if len(scores) == 1 else scores


ENDPOINT = Endpoint(
    "POST", ("/score", "/v1/score"), score, ScoreResponse, ScoreRequest, example={"input": "Hello!"}
)
