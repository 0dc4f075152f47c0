"""GET /live_stats: the engine as it works, as server-sent events for the page at / and for scripts."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import Connection, chunk_connection
from server.context import ServerContext, context_of
from server.endpoint import Endpoint
from server.live import Watcher
from server.schema.live import LiveStats
from server.stream import HEADERS
from server.watch import watch_of


class LiveStream(Response):
    """Sends the events of the feed until it ends, or the client leaves or no longer reads."""

    media_type = "text/event-stream"

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, watch = self._context, watch_of(scope)
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        with context.live.watch() as watcher, context.open_requests.watching(scope["state"]):
            watch.begin(receive, None)
            with watch:
                await self._send_events(watcher, send, chunk_connection(scope))

    async def _send_events(self, watcher: Watcher, send: Send, connection: Connection | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while (event := await watcher.get()) is not None:
            if connection is None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            else:
                await connection.send_chunk(event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def live_stats(http: Request) -> Response:
    """The engine as it works: four events a second, of up to 16 watchers at a time."""
    context = context_of(http)
    context.check_ready()
    await http.body()  # there is none: what comes after it is the client's leaving
    return LiveStream(context)


ENDPOINT = Endpoint("GET", ("/live_stats",), live_stats, chunk=LiveStats)
