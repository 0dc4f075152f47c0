"""KV events: hashes and events of blocks, and a subscriber that rebuilds the tree of a running engine."""

import asyncio
import random
import socket
from array import array
from dataclasses import replace

import numpy as np
import pytest

from engine import kv_events
from engine.config import EngineConfig
from engine.kv_events import Blocks, Cached, Cleared, Evicted, KVEvents, block_hash
from tests.engine.toy_engine import idle, request, toy_engine

PAGE_SIZE = 4


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def cached(tokens: list[int], numbers: list[int], parent: int | None = None) -> Cached:
    return Cached(array("i", tokens).tobytes(), pages(*numbers), parent)


class Index:
    """What a router keeps: the blocks of a server, by hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def apply(self, event: list) -> None:
        kind, *fields = event
        if kind == "BlockStored":
            hashes, parent, token_ids, size, lora_id, medium, lora_name = fields
            assert (lora_id, medium, lora_name) == (None, "GPU", None)
            assert len(token_ids) == len(hashes) * size
            for number, own in enumerate(hashes):
                assert own not in self.blocks, "stored twice"
                self.blocks[own] = (parent, tuple(token_ids[number * size : (number + 1) * size]))
                parent = own
        elif kind == "BlockRemoved":
            for own in fields[0]:
                self.blocks.pop(own, None)
        else:
            assert event == ["AllBlocksCleared"]
            self.blocks.clear()

    def prefixes(self) -> set[tuple[int, ...]]:
        """The tokens of each block and of all before it."""

        def prefix(own: int) -> tuple[int, ...]:
            parent, token_ids = self.blocks[own]
            return token_ids if parent is None else prefix(parent) + token_ids

        return {prefix(own) for own in self.blocks}


def tree_prefixes(cache) -> set[tuple[int, ...]]:
    """What the prefix cache has in the namespace of all requests, in the form of Index.prefixes()."""

    def walk(node, before):
        tokens = (*before, *array("i", node.key))
        for end in range(len(before) + PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
            yield tokens[:end]
        for name, child in node.children.items():
            if node.parent is not None or name[0] is None:
                yield from walk(child, tokens)

    return set(walk(cache._root, ()))


def test_blocks_are_named_by_their_tokens_and_all_before():
    blocks = Blocks(2)
    [first] = blocks.events([cached([1, 2, 3, 4], [7, 5])])
    [second] = blocks.events([cached([5, 6], [9], parent=5)])
    hashes = first[1]
    assert first == ["BlockStored", hashes, None, [1, 2, 3, 4], 2, None, "GPU", None]
    assert hashes[0] == block_hash(None, array("i", [1, 2]))
    assert hashes[1] == block_hash(hashes[0], array("i", [3, 4])) != block_hash(None, array("i", [3, 4]))
    assert second[1:4] == [[block_hash(hashes[1], array("i", [5, 6]))], hashes[1], [5, 6]]
    assert blocks.events([Evicted(pages(9, 5, 1))]) == [["BlockRemoved", [second[1][0], hashes[1]], "GPU"]]
    [other] = Blocks(2).events([cached([1, 2, 3, 4], [0, 1])])
    assert other == first, "another server has the same hashes"


def test_blocks_that_not_every_request_may_use_are_left_out():
    blocks = Blocks(2)
    [stored] = blocks.events([cached([1, 2, -1, -1, 3, 4], [0, 1, 2])])
    assert stored[3] == [1, 2], "tokens up to an image"
    assert blocks.events([cached([5, 6], [3], parent=2), Evicted(pages(3, 2))]) == []
    listener = KVEvents(None, None, "")
    listener.pages_cached("tenant", b"", pages(1), None)
    assert listener._changes.empty()


def test_changes_that_are_lost_clear_the_index(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_PENDING", 2)
    listener = KVEvents(None, None, "")
    for number in range(6):
        listener.pages_cached(None, array("i", [number]).tobytes(), pages(number), None)
    assert listener._changes.qsize() == 3
    listener._num_done = 3  # the thread caught up
    listener.pages_evicted(pages(5))
    waiting = [listener._changes.get() for _ in range(5)]
    assert isinstance(waiting[3], Cleared) and isinstance(waiting[4], Evicted)
    assert Blocks(1).events(waiting)[3:] == [["AllBlocksCleared"]]


def test_settings_that_cannot_work_are_named(monkeypatch):
    assert KVEvents.from_config(EngineConfig()) is None
    pytest.importorskip("zmq")
    with pytest.raises(ValueError, match="kv_events_endpoint: ipc:///nowhere/x cannot be opened"):
        KVEvents.from_config(EngineConfig(kv_events_endpoint="ipc:///nowhere/x"))
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    with pytest.raises(ValueError, match=r"needs msgspec.*'\.\[kv-events\]'"):
        KVEvents.from_config(EngineConfig(kv_events_endpoint="tcp://*:5557"))


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_it_listens_at_one_address(address):
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.set(zmq.IPV6, 1)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            try:
                free.bind((address.strip("[]"), 0))
            except OSError:
                pytest.skip("this machine has no IPv6")
            port = free.getsockname()[1]
        events = KVEvents.from_config(EngineConfig(kv_events_endpoint=f"bind:tcp://{address}:{port}"))
        subscriber.subscribe("")
        subscriber.connect(f"tcp://{address}:{port}")
        for _ in range(1000):  # until the subscription has arrived
            events._send([["AllBlocksCleared"]])
            if subscriber.poll(10):
                break
        assert subscriber.recv_multipart()[0] == b""
        events.discard()


async def test_a_subscriber_rebuilds_the_tree(tmp_path, run_ahead):
    zmq = pytest.importorskip("zmq")
    msgpack = pytest.importorskip("msgspec").msgpack
    endpoint = f"ipc://{tmp_path}/events"
    index, numbers = Index(), []
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.set(zmq.RECONNECT_IVL, 1)
        subscriber.subscribe("kv@me")

        def receive(timeout_seconds: float) -> int:
            """Apply all messages that have come; return how many."""
            before = len(numbers)
            while subscriber.poll(timeout_seconds * 1000 if len(numbers) == before else 0):
                topic, number, payload = subscriber.recv_multipart()
                seconds, events, rank = msgpack.decode(payload)
                assert topic == b"kv@me@toy" and len(number) == 8 and seconds > 1.7e9 and rank == 0
                numbers.append(int.from_bytes(number, "big"))
                for event in events:
                    index.apply(event)
            return len(numbers) - before

        async with toy_engine(
            num_pages=24, run_ahead=run_ahead, kv_events_endpoint=endpoint, kv_events_topic="kv@me@toy"
        ) as engine:
            subscriber.connect(endpoint)
            cache = engine._scheduler.prefix_cache
            for token in range(1, 1000):  # until the subscription has arrived; earlier events are lost
                await engine.submit(request([token % 50] * 9, max_tokens=1)).collect()
                if receive(0.02):
                    break
            await idle(engine)
            cache.evict(24)
            chooser = random.Random(7)
            for _ in range(40):
                prompts = [
                    [*range(1, 1 + chooser.randrange(4, 20)), *chooser.choices(range(20, 30), k=6)]
                    for _ in range(3)
                ]
                streams = [engine.submit(request(prompt, max_tokens=5)) for prompt in prompts]
                salted = engine.submit(replace(request(prompts[0]), cache_salt="tenant"))
                await asyncio.gather(*(stream.collect() for stream in (*streams, salted)))
            await idle(engine)
            expected = tree_prefixes(cache)
            assert cache.num_evicted_pages > 50 and len(expected) > 5, "the test must evict and keep"
        while receive(0.3):
            pass
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "messages are missing"
    assert index.prefixes() == expected
