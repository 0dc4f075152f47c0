"""Ends what a request's task does when its client leaves, its time is up or the server drains."""

import asyncio
from types import TracebackType

from starlette.requests import Request
from starlette.types import Receive, Scope

from server.errors import DeadlinePassed

STATE = "watch"  # in the scope's state


class ClientGone(Exception):
    """The client has left before its answer was complete."""


class Watch:
    """Interrupts the blocks of one task that are entered with it: they raise the reason.

        with watch:
            ...

    A reason that comes between two blocks is raised at the beginning of the next.
    """

    def __init__(self) -> None:
        self._reason: Exception | None = None
        self._task: asyncio.Task[object] | None = None  # inside a block
        self._num_cancels = 0
        self._leaving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, receive: Receive, seconds: float | None) -> None:
        """Interrupt with ClientGone when the client leaves, and with DeadlinePassed after `seconds`.

        The body must have been read: the transport's next message is that the client has left.
        """
        loop = asyncio.get_running_loop()
        self._leaving = loop.create_task(self._wait_for_leaving(receive), name="client leaves")
        if seconds is not None:
            late = DeadlinePassed("The answer took longer than this server allows.")
            self._timer = loop.call_later(seconds, self.interrupt, late)

    def end(self) -> None:
        """Watch no longer."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None  # its traceback refers to this: only the collector would free them
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, reason: Exception) -> None:
        """End the block that runs, or the next one, with `reason`; only the first reason counts."""
        if self._reason is None:
            self._reason = reason
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self._reason is not None:
            raise self._reason
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels = self._task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._reason is None or task is None:
            return
        # As asyncio.timeout() does: a cancellation that came from elsewhere goes on.
        if task.uncancel() <= self._num_cancels and isinstance(error, asyncio.CancelledError):
            raise self._reason from None

    async def _wait_for_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())


def watch_of(request: Request | Scope) -> Watch:
    """Return the watch over a request."""
    watch: Watch = request["state"][STATE]
    return watch
