"""Clients over raw sockets that read, read slowly, vanish at random moments, or send garbage.

All they do follows from a seed. Requests are greedy, so that an answer can be compared with another one to
the same request.
"""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

READ_BYTES = 2**16
SLOW_READ_BYTES = 256
# The moments at which clients vanish.
STAGES = ("connecting", "waiting", "prefill", "mid-stream")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
WORDS = ("river", "stone", "lamp", "winter", "paper", "seven", "quiet", "engine", "green", "music", "bread")


class Behaviour(StrEnum):
    """What a client does."""

    READS = "reads"
    READS_SLOWLY = "reads slowly"
    VANISHES = "vanishes"
    SENDS_GARBAGE = "sends garbage"


@dataclass(frozen=True)
class Shares:
    """Shares of clients that vanish, read slowly and send garbage; the others read."""

    vanishes: float = 0.30
    reads_slowly: float = 0.10
    sends_garbage: float = 0.05

    def choose(self, rng: random.Random) -> Behaviour:
        """Return a behaviour by its share."""
        number = rng.random()
        for share, behaviour in (
            (self.vanishes, Behaviour.VANISHES),
            (self.reads_slowly, Behaviour.READS_SLOWLY),
            (self.sends_garbage, Behaviour.SENDS_GARBAGE),
        ):
            if number < share:
                return behaviour
            number -= share
        return Behaviour.READS


@dataclass(frozen=True)
class Prepared:
    """A request: its name, path and body. Requests of one name have one answer."""

    name: str
    path: str
    body: dict[str, Any]

    def encode(self) -> bytes:
        """Return the request in HTTP/1.1, on a connection that closes after it."""
        data = json.dumps(self.body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: {len(data)}"
        return f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data


@dataclass(frozen=True)
class Outcome:
    """How a request ended: its status, 0 without one; the answer of a whole stream; what is wrong, if any."""

    status: int = 0
    answer: str | None = None
    fault: str = ""


def token_requests(count: int, max_tokens: int, seed: int) -> list[Prepared]:
    """Return streamed completions of prompts of token ids below 60, which every model has."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        prompt = rng.choices(range(1, 60), k=rng.randint(2, 200))
        body = {"prompt": prompt, "max_tokens": rng.randint(1, max_tokens)}
        body |= {"temperature": 0, "seed": 0, "stream": True}
        found.append(Prepared(f"tokens {number}", "/v1/completions", body))
    return found


def mixed_requests(max_tokens: int, seed: int) -> Iterator[Prepared]:
    """Yield requests without end: chats, streams, schemas, tools and regular expressions, all of them new."""
    rng = random.Random(seed)
    number = 0
    while True:
        number += 1
        text = " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number} {text}"}],
            "max_tokens": rng.randint(1, max_tokens),
            "temperature": 0,
            "stream": rng.random() < 0.6,
        }
        kind = rng.choice(("chat", "chat", "chat", "schema", "tools", "regex"))
        names = [f"{rng.choice(WORDS)}_{number}_{place}" for place in range(rng.randint(1, 5))]
        schema = {
            "type": "object",
            "properties": {name: {"type": rng.choice(("string", "integer", "boolean"))} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        if kind == "schema":
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": schema},
            }
        elif kind == "tools":
            body["tools"] = [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}}]
            body["tool_choice"] = "required"
        elif kind == "regex":
            body["structured_outputs"] = {"regex": f"(no|yes)-{number}-[a-z]{{2,8}}"}
        yield Prepared(f"{kind} {number}", "/v1/chat/completions", body)


class Client:
    """Sends requests to a server; `is_stopping` lets slow readers hurry, so that a run ends."""

    def __init__(self, host: str, port: int, timeout_seconds: float, slow_seconds: float = 0.02) -> None:
        self.host, self.port = host, port
        self.timeout_seconds = timeout_seconds
        self.slow_seconds = slow_seconds
        self.is_stopping = False

    async def perform(self, request: Prepared, behaviour: Behaviour, rng: random.Random) -> Outcome:
        """Make one request in the way of `behaviour`; return how it ended."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                match behaviour:
                    case Behaviour.VANISHES:
                        return await self._vanish(request, rng)
                    case Behaviour.SENDS_GARBAGE:
                        return await self._send_garbage(request, rng)
                    case _:
                        return await self._read(request, is_slow=behaviour is Behaviour.READS_SLOWLY)
        except TimeoutError:
            return Outcome(fault=f"{behaviour}: {request.name} hangs for {self.timeout_seconds:g} s")
        except OSError as error:
            return Outcome(fault=f"{behaviour}: {request.name}: {error!r}")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def _read(self, request: Prepared, *, is_slow: bool) -> Outcome:
        """Read the whole answer, slowly or not."""
        reader, writer = await self._connect()
        try:
            writer.write(request.encode())
            data = bytearray()
            while part := await reader.read(SLOW_READ_BYTES if is_slow else READ_BYTES):
                data += part
                if is_slow and not self.is_stopping:
                    await asyncio.sleep(self.slow_seconds)
        finally:
            writer.transport.abort()
        return read_answer(request, bytes(data))

    async def _vanish(self, request: Prepared, rng: random.Random) -> Outcome:
        """Leave at a random moment, by a reset or an orderly close."""
        reader, writer = await self._connect()
        stage = rng.choice(STAGES)
        data = request.encode()
        if rng.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        try:
            if stage == "connecting":
                writer.write(data[: rng.randrange(len(data))])
                await asyncio.sleep(0.01 * rng.random())
                return Outcome()
            writer.write(data)
            if stage == "waiting":
                await asyncio.sleep(0.02 * rng.random())
            else:
                with suppress(OSError):  # a server may refuse
                    await reader.read(READ_BYTES)
                    for _ in range(rng.randrange(1, 20) if stage == "mid-stream" else 0):
                        await reader.read(READ_BYTES)
            return Outcome()
        finally:
            writer.close()

    async def _send_garbage(self, request: Prepared, rng: random.Random) -> Outcome:
        """Send what is no request, or a wrong one; it must get an error, or the connection must end."""
        data = request.encode()
        head, _, body = data.partition(b"\r\n\r\n")
        bad = rng.choice(
            (
                rng.randbytes(rng.randint(1, 3000)) + b"\r\n\r\n",
                b"\x16\x03\x01\x02\x00" + rng.randbytes(200),
                b"GET /" + b"a" * rng.randint(1, 200) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                head + b"\r\nX: " + b"y" * 200_000 + b"\r\n\r\n" + body,
                head + b"\r\n\r\n" + b"{" * len(body),
                head + b"\r\n\r\n" + rng.randbytes(len(body)),
                data.replace(b'"temperature": 0', b'"temperature":-1'),
                data.replace(b"Content-Length", b"Content-Lengt\xff"),
            )
        )
        reader, writer = await self._connect()
        try:
            writer.write(bad)
            answer = b""
            with suppress(OSError):  # a server may reset what it does not read to the end
                writer.write_eof()
                answer = await reader.read()
            status = status_of(answer)
            if status and not 400 <= status < 500:
                return Outcome(status, fault=f"garbage {bad[:60]!r} got {status}")
            return Outcome(status)
        finally:
            writer.transport.abort()


def status_of(data: bytes) -> int:
    """Return the status of a response in HTTP/1.1; 0 if it has none."""
    words = data[:16].split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def read_answer(request: Prepared, data: bytes) -> Outcome:
    """Return what a whole response says: the text, calls and end of its answer."""
    status = status_of(data)
    head, _, body = data.partition(b"\r\n\r\n")
    if status in (429, 503):
        return Outcome(status)
    if status != 200:
        return Outcome(status, fault=f"{request.name} got {status}: {body[:300]!r}")
    if b"chunked" in head.lower():
        body, is_whole = without_chunks(body)
        if not is_whole:
            return Outcome(status, fault=f"{request.name}: the response is cut after {body[-80:]!r}")
    events = [body]
    if request.body["stream"]:
        lines = [line for line in body.split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"data: [DONE]":
            return Outcome(status, fault=f"{request.name}: no [DONE] after {body[-80:]!r}")
        events = [line.removeprefix(b"data: ") for line in lines]
    pieces: list[str] = []
    end = None
    for event in map(json.loads, events):
        if "error" in event:
            return Outcome(status, fault=f"{request.name}: {event['error']}")
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            pieces.append(said.get("content") or said.get("text") or "")
            for call in said.get("tool_calls") or ():
                pieces += (call["function"].get("name") or "", call["function"].get("arguments") or "")
            end = choice.get("finish_reason") or end
    if end is None:
        return Outcome(status, fault=f"{request.name}: no finish_reason")
    return Outcome(status, f"{end}: {''.join(pieces)}")


def without_chunks(body: bytes) -> tuple[bytes, bool]:
    """Return the bytes of a chunked body, and True if its last chunk is there."""
    parts = []
    place = 0
    while (end := body.find(b"\r\n", place)) >= 0:
        size = int(body[place:end], 16)
        if not size:
            return b"".join(parts), True
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(parts), False
