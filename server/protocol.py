"""The protocol of a connection: HTTP/1.1, until its client asks for HTTP/2."""

from functools import partial
from typing import Any

from hypercorn.events import Closed, RawData
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError

from server.arrivals import ArrivalLimiter
from server.http1 import Http1
from server.http2 import Http2


class Protocol:
    """Begins as HTTP/1.1, and becomes HTTP/2 with the preface of that, or by an upgrade."""

    def __init__(self, *parts: Any, arrivals: ArrivalLimiter, send_timeout_seconds: float) -> None:
        self.protocol: Http1 | Http2 = Http1(*parts)
        self._http2 = partial(Http2, *parts, arrivals=arrivals, send_timeout_seconds=send_timeout_seconds)

    async def handle(self, event: RawData | Closed) -> None:
        """Take bytes of the client, or note that it has left."""
        try:
            await self.protocol.handle(event)
            return
        except H2ProtocolAssumedError as error:
            self.protocol, data = self._http2(), error.data
            await self.protocol.begin()
        except H2CProtocolRequiredError as error:
            self.protocol, data = self._http2(), error.data
            await self.protocol.begin_upgraded(error.settings, error.headers)
        await self.protocol.handle(RawData(data))

    def last_words(self) -> bytes:
        """Return what is sent before the server closes the connection."""
        return self.protocol.last_words() if isinstance(self.protocol, Http2) else b""
