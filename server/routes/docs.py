"""GET /docs: the API's description for people. One page that loads nothing but /openapi.json."""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

# The page has its own script and style inside, talks to this server alone and cannot be framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@cache
def page() -> bytes:
    """The page, as it lies in the package."""
    return files("server").joinpath("web", "docs.html").read_bytes()


async def docs(http: Request) -> Response:
    """This API on a page that works offline."""
    return Response(page(), media_type="text/html", headers=HEADERS)
