"""POST /abort, and /abort_request as in LightLLM and SGLang: ends requests that are being answered."""

from starlette.requests import Request
from starlette.responses import Response

from server.context import context_of
from server.endpoint import Endpoint, read_request
from server.schema.abort import AbortRequest, AbortResponse


async def abort(http: Request) -> Response:
    """Number of the requests that are ended: those of the API key with an id, or all of them."""
    body, _ = await read_request(http, AbortRequest)
    aborted = context_of(http).open_requests.abort(body.wanted, http.scope["state"])
    return Response(AbortResponse(aborted=aborted).model_dump_json(), media_type="application/json")


ENDPOINT = Endpoint(
    "POST",
    ("/abort", "/abort_request"),
    abort,
    AbortResponse,
    AbortRequest,
    example={"request_id": "chatcmpl-0123456789abcdef"},
)
