"""Ends what a request's task does when its client leaves, its time is up or the server drains."""

import asyncio
from types import TracebackType

from starlette.requests import Request
from starlette.types import Receive, Scope

from server.errors import DeadlinePassed

STATE = "watch"  # in the scope's state


class ClientGone(Exception):
    """The client has left before its answer was complete."""


class SlowClient(ClientGone):
    """The client has read nothing for longer than `send_timeout_seconds`; it is sent no more."""


class Watch:
    """Interrupts the blocks of one task that are entered with it: they raise the reason.

        with watch:
            ...

    A reason that comes between two blocks is raised at the beginning of the next.
    """

    def __init__(self, *, is_informed: bool = False) -> None:
        """With `is_informed`, the transport calls client_left(); without, it has to be asked."""
        self._is_informed = is_informed
        self._has_left = False
        self._is_answering = False
        self._reason: Exception | None = None
        self._task: asyncio.Task[object] | None = None  # inside a block
        self._num_cancels = 0
        self._asking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, receive: Receive, seconds: float | None) -> None:
        """Interrupt with ClientGone if the client leaves, and with DeadlinePassed after `seconds`.

        The body must have been read: the transport's next message is that the client has left.
        """
        loop = asyncio.get_running_loop()
        self._is_answering = True
        if self._has_left:
            self.interrupt(ClientGone())
        elif not self._is_informed:
            self._asking = loop.create_task(self._ask(receive), name="client leaves")
        if seconds is not None:
            late = DeadlinePassed("The answer took longer than this server allows.")
            self._timer = loop.call_later(seconds, self.interrupt, late)

    def note_answered(self) -> None:
        """The answer is complete: the client may leave."""
        self._is_answering = False

    def end(self) -> None:
        """Watch no longer."""
        self.note_answered()
        # The tracebacks of both refer to this: only the collector would free them.
        self._reason = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._timer is not None:
            self._timer.cancel()

    def client_left(self) -> None:
        """The client has left."""
        self._has_left = True
        if self._is_answering:
            self.interrupt(ClientGone())

    def end_answer(self, reason: Exception) -> bool:
        """Interrupt with `reason`; return False if no answer is under way, or it ends already."""
        if not self._is_answering or self._reason is not None:
            return False
        self.interrupt(reason)
        return True

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

    async def _ask(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_left()


def watch_of(request: Request | Scope) -> Watch:
    """Return the watch over a request."""
    watch: Watch = request["state"][STATE]
    return watch
