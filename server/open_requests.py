"""The requests that are being answered: how many there are, and which of them to end."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from server.errors import RequestAborted
from server.watch import STATE as WATCH
from server.watch import Watch

State = MutableMapping[str, Any]  # of a scope
API_KEY = "api_key_index"  # in the state: which of the API keys the request was sent with


class OpenRequests:
    """The states of all requests that are being answered. Lives on the event loop."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def begin(self, state: State) -> None:
        """A request is being answered."""
        self._states[id(state)] = state

    def end(self, state: State) -> None:
        """A request ended: its answer has been sent, or its client has left."""
        del self._states[id(state)]

    @contextmanager
    def watching(self, state: State) -> Iterator[None]:
        """A block in which a request that began counts as none: the server is idle beside it."""
        self.end(state)
        try:
            yield
        finally:
            self.begin(state)

    def is_empty(self) -> bool:
        """Return True if no request is being answered."""
        return not self._states

    def abort(self, wanted: str | None, asker: State) -> int:
        """End the requests with an id, or all if it is None, with RequestAborted; return their number.

        Only those count that were sent with the same API key as the request `asker`.
        """
        key = asker.get(API_KEY)
        watches: list[Watch] = [
            state[WATCH]
            for state in self._states.values()
            if WATCH in state and state.get(API_KEY) == key and (wanted is None or wanted in ids_of(state))
        ]
        return sum(watch.end_answer(RequestAborted("The request was aborted.")) for watch in watches)


def ids_of(state: State) -> set[str]:
    """Return the ids of a request: of its X-Request-Id header, of its answer, and those its body gives it."""
    ids = {state["request_id"], *state.get("given_ids", ())}
    if "answer" in state:
        ids.add(state["answer"].id)
    return ids
