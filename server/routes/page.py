"""GET / and /docs: the pages for people, and the files they load; for other clients of / a line of text.

The files are read once, and a path is looked up among them: nothing else can be reached.
"""

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

PAGES = {"/", "/docs"}
PREFIX = "/web/"
MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts, styles and data from this server alone, nothing inline, no frames, and no text that becomes markup.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A new version of the server has new files under the same names: browsers ask if theirs is still right.
    "Cache-Control": "no-cache",
}


class WebFile(NamedTuple):
    """A file of the page, with the headers it is sent with."""

    body: bytes
    headers: dict[str, str]


@cache
def web_files() -> dict[str, WebFile]:
    """Return the files of both pages by name, as they lie in the package."""
    found = {}
    for path in files("server").joinpath("web").iterdir():
        media_type = MEDIA_TYPES.get(path.name.rpartition(".")[2])
        if media_type is not None:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.name] = WebFile(body, {**HEADERS, "Content-Type": media_type, "ETag": etag})
    return found


def file_paths() -> set[str]:
    """Return the paths of the files that the pages load."""
    return {PREFIX + name for name in web_files() if not is_page(name)}


def is_page(name: str) -> bool:
    """Return whether a file is a page: it has a path of its own, from which it names its other files."""
    return name.endswith(".html")


def respond(http: Request, name: str, **headers: str) -> Response:
    """Send a file, or 304 if the client has it."""
    file = web_files()[name]
    known = [tag.strip().removeprefix("W/") for tag in http.headers.get("if-none-match", "").split(",")]
    if file.headers["ETag"] in known:
        return Response(status_code=304, headers=file.headers | headers)
    return Response(file.body, headers=file.headers | headers)


async def root(http: Request) -> Response:
    """The page for clients that accept HTML; for probes a line of text."""
    if "text/html" in http.headers.get("accept", ""):
        return respond(http, "page.html", Vary="Accept")
    return PlainTextResponse("monoloop is running; its API is at /docs\n", headers={"Vary": "Accept"})


async def docs(http: Request) -> Response:
    """The API's description. /docs/ leads to /docs, since its files are named relative to that."""
    if http.scope.get("raw_path", b"").endswith(b"/"):
        return Response(status_code=307, headers={"Location": "../docs"})
    return respond(http, "docs.html")


async def web_file(http: Request) -> Response:
    """A file that a page loads."""
    name = http.path_params["name"]
    if name not in web_files() or is_page(name):
        raise HTTPException(404)
    return respond(http, name)


ROUTES = (
    Route("/", root, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
    Route(PREFIX + "{name}", web_file, methods=["GET"]),
)
