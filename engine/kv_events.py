"""Announces over ZeroMQ which blocks the prefix cache has, in the format of vLLM's KV events.

Routers subscribe, keep an index of the blocks of every server, and send a request where most of its prompt is
cached. A message has three frames: topic, sequence number (8 bytes, big endian), and an array in msgpack:

    [time, [event, ...], 0]
    ["BlockStored", hashes, parent hash or nil, token ids, block size, nil, "GPU", nil]
    ["BlockRemoved", hashes, "GPU"]
    ["AllBlocksCleared"]

A block is a page. Its hash, 64 bits, covers its tokens and all before them, and is the same in every server.
Pages that some requests may not use are not announced: those with a cache_salt, with images, or of long
contexts under LongRoPE.
"""

import logging
import threading
import time
from array import array
from collections.abc import Hashable, Iterable
from hashlib import blake2b
from queue import SimpleQueue
from typing import Any, NamedTuple

from engine.config import EngineConfig
from engine.kv_layout import PageArray
from engine.listener import StepListener
from engine.model_info import ModelInfo

logger = logging.getLogger("monoloop.engine")

MAX_PENDING = 1_000_000  # pages in changes of the cache that wait for the thread: about 100 MB
MAX_EVENTS = 256  # in one message
MAX_UNSENT = 1_000  # messages that wait for a slow subscriber, who misses later ones
LINGER_MILLISECONDS = 500
MEDIUM = "GPU"  # the first tier of a cache, whatever its device

Event = list[Any]


class Cached(NamedTuple):
    """Pages [num_columns] that entered the cache after `parent`, with their tokens as int32."""

    tokens: bytes
    pages: PageArray
    parent: int | None


class Evicted(NamedTuple):
    """Pages that left the cache."""

    pages: PageArray


class Cleared(NamedTuple):
    """Changes were lost: nothing is known of the cache any more."""


Change = Cached | Evicted | Cleared


class Blocks:
    """Makes events from changes of the cache: gives each page that is announced its block's hash."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[int, int] = {}

    def events(self, changes: Iterable[Change]) -> list[Event]:
        """Return the events of changes, in order."""
        return [event for change in changes if (event := self._event(change)) is not None]

    def _event(self, change: Change) -> Event | None:
        if isinstance(change, Cached):
            return self._stored(change)
        if isinstance(change, Evicted):
            found = (self._hashes.pop(page, None) for page in change.pages.tolist())
            hashes = [block_hash for block_hash in found if block_hash is not None]
            return ["BlockRemoved", hashes, MEDIUM] if hashes else None
        self._hashes.clear()
        return ["AllBlocksCleared"]

    def _stored(self, change: Cached) -> Event | None:
        parent = None if change.parent is None else self._hashes.get(change.parent)
        if parent is None and change.parent is not None:
            return None  # the blocks before them are not announced
        tokens = array("i", change.tokens)
        size = self._page_size
        last, hashes = parent, []
        for column, page in enumerate(change.pages.tolist()):
            block = tokens[column * size : (column + 1) * size]
            if min(block) < 0:  # content in place of tokens
                break
            last = self._hashes[page] = block_hash(last, block)
            hashes.append(last)
        if not hashes:
            return None
        token_ids = tokens[: len(hashes) * size].tolist()
        return ["BlockStored", hashes, parent, token_ids, size, None, MEDIUM, None]


def block_hash(parent: int | None, tokens: "array[int]") -> int:
    """Return the hash, 64 bits, of a block after the one with hash `parent`."""
    before = b"" if parent is None else parent.to_bytes(8, "big")
    return int.from_bytes(blake2b(before + tokens.tobytes(), digest_size=8).digest(), "big")


class KVEvents(StepListener):
    """Publishes events. The loop only hands over changes; a thread hashes, packs and sends, and never waits.

    If the thread cannot keep up, changes are lost, and it says so by AllBlocksCleared.
    """

    def __init__(self, context: Any, socket: Any, topic: str) -> None:
        self._context = context
        self._socket = socket
        self._topic = topic.encode()
        self._changes: SimpleQueue[Change | None] = SimpleQueue()
        self._num_put = 0  # pages handed over, counted by the loop
        self._num_done = 0  # and announced, counted by the thread
        self._has_lost = False
        self._num_sent = 0
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "KVEvents | None":
        """Open the socket if the settings name an endpoint. Raises ValueError, naming the setting."""
        if config.kv_events_endpoint is None:
            return None
        endpoint = config.kv_events_endpoint.removeprefix("bind:")
        try:
            import msgspec  # noqa: F401 - missing, it ends the start and not the thread
            import zmq
        except ImportError as error:
            raise ValueError(
                f"kv_events_endpoint: needs {error.name}: in monoloop's folder, pip install '.[kv-events]'"
            ) from None
        context = zmq.Context()
        socket = context.socket(zmq.PUB)
        socket.set(zmq.SNDHWM, MAX_UNSENT)
        socket.set(zmq.LINGER, LINGER_MILLISECONDS)
        socket.set(zmq.IPV6, "[" in endpoint)
        is_bound = endpoint != config.kv_events_endpoint or any(
            part in endpoint for part in ("://*", "://0.0.0.0", "://[::]", "ipc://")
        )
        try:
            (socket.bind if is_bound else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            context.destroy(0)
            raise ValueError(f"kv_events_endpoint: {endpoint} cannot be opened ({error.strerror})") from None
        logger.info("KV events %s %s", "listen at" if is_bound else "are sent to", endpoint)
        return cls(context, socket, config.kv_events_topic or "")

    def discard(self) -> None:
        """Close the socket."""
        self._context.destroy(0)

    def started(self, model: ModelInfo, config: EngineConfig, token_budget: int, fingerprint: str) -> None:
        """Start the thread, which says that the cache is empty."""
        if all(model.kv_windows):
            raise ValueError(
                "kv_events_endpoint: this model has sliding windows only, and its blocks are not whole"
            )
        self._blocks = Blocks(model.page_size)
        self._changes.put(Cleared())
        self._thread.start()

    # Called by the loop

    def pages_cached(self, namespace: Hashable, tokens: bytes, pages: PageArray, parent: int | None) -> None:
        """Announce pages that entered the cache, if every request may use them."""
        if namespace is None:
            self._put(Cached(tokens, pages, parent))

    def pages_evicted(self, pages: PageArray) -> None:
        """Announce that pages left the cache."""
        self._put(Evicted(pages))

    def _put(self, change: Cached | Evicted) -> None:
        if self._num_put - self._num_done > MAX_PENDING:
            self._has_lost = True
            return
        if self._has_lost:
            self._has_lost = False
            self._changes.put(Cleared())
        self._num_put += len(change.pages)
        self._changes.put(change)

    def close(self) -> None:
        """Send the remaining events and close the socket; waits LINGER_MILLISECONDS for subscribers."""
        self._changes.put(None)
        self._thread.join()
        self._context.destroy()

    # Run by the thread

    def _run(self) -> None:
        try:
            while (first := self._changes.get()) is not None:
                changes = [first]
                while len(changes) < MAX_EVENTS and not self._changes.empty():
                    if (change := self._changes.get()) is None:
                        self._changes.put(None)  # for the outer loop
                        break
                    changes.append(change)
                self._send(self._blocks.events(changes))
                self._num_done += sum(
                    len(change.pages) for change in changes if not isinstance(change, Cleared)
                )
        except Exception:
            logger.exception("KV events end here")

    def _send(self, events: list[Event]) -> None:
        import msgspec

        if events:
            number = self._num_sent.to_bytes(8, "big")
            self._num_sent += 1
            payload = msgspec.msgpack.encode([time.time(), events, 0])
            self._socket.send_multipart(
                (self._topic, number, payload)
            )  # a PUB socket drops, and never blocks
