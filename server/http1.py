"""HTTP/1.1 with hypercorn's protocol, which reads on while a request is answered.

hypercorn stops to read a connection once bytes follow a complete request: the next request, a stray line end,
or anything else. It then does not notice that the client leaves, nor that the answer has ended.
"""

import asyncio
from typing import Any

import h11
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol

# Of what a client sends while its request is answered. Beyond it nothing is kept, and the connection is
# closed after the answer: clients send requests again that were not answered (RFC 9112, section 9.3.2).
MAX_EARLY_BYTES = 2**16
LINGER_SECONDS = 1.0
# Some clients send them after the body of a request: RFC 9112, section 2.2.
LINE_ENDS = b"\r\n"
# Of the client, once its request is complete.
COMPLETE = (h11.DONE, h11.MUST_CLOSE, h11.MIGHT_SWITCH_PROTOCOL)  # type: ignore[attr-defined] # no export


class Parser(h11.Connection):
    """h11's parser, which leaves what follows a request until that is answered."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; NEED_DATA once a request is complete, whatever follows it."""
        return h11.NEED_DATA if self.their_state in COMPLETE else super().next_event()


class Http1(H11Protocol):  # type: ignore[misc]  # its package is not checked
    """One connection. `handle` returns at once when a request is complete, and takes what follows it."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._parsing = asyncio.Lock()
        self._has_dropped = False
        self._begin()

    def _begin(self) -> None:
        self.connection = Parser(h11.SERVER, self.config.h11_max_incomplete_size)

    async def handle(self, event: Event) -> None:
        """Take bytes of the client, or note that it has left."""
        if isinstance(event, RawData):
            async with self._parsing:
                await self._take(event)
        else:
            await super().handle(event)

    async def _take(self, event: RawData) -> None:
        if self.connection.their_state in COMPLETE:
            self._keep(event.data)
        elif self.connection.their_state is h11.IDLE and not self.connection.trailing_data[0]:
            if data := event.data.lstrip(LINE_ENDS):
                await super().handle(RawData(data))
        else:
            await super().handle(event)

    def _keep(self, data: bytes) -> None:
        """Keep what comes before the request is answered."""
        if len(self.connection.trailing_data[0]) + len(data) <= MAX_EARLY_BYTES:
            self.connection.receive_data(data)
        else:
            self._has_dropped = True

    async def _maybe_recycle(self) -> None:
        """End an answered request, and begin the next if some of it has come."""
        early = self.connection.trailing_data[0]
        if self._has_dropped:
            await self._close_stream()
            self.task_group.spawn(self._close_later)
            return
        await super()._maybe_recycle()
        if self.connection.our_state is h11.IDLE and (early := early.lstrip(LINE_ENDS)):
            self._begin()
            self.connection.receive_data(early)
            self.task_group.spawn(self._parse_early)

    async def _close_later(self) -> None:
        """Close once what is on its way has been read: a close with unread data resets the connection."""
        await asyncio.sleep(LINGER_SECONDS)
        await self.send(Closed())

    async def _parse_early(self) -> None:
        async with self._parsing:
            await self._handle_events()
