"""One streamed completion over a plain asyncio connection.

The client often shares the machine with the server it measures, so it must cost little: it reads HTTP/1.1 and
SSE itself in the socket's callback, about 20 µs of CPU a chunk where httpx takes 50.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import orjson

from server.commands.bench.workload import Job
from server.proxies import is_loopback


@dataclass(slots=True)
class Result:
    """Measurements of one stream, in `time.perf_counter()` seconds; chunks are those that carry content."""

    prompt_tokens: int
    output_tokens: int = 0
    start_seconds: float = 0.0
    end_seconds: float = 0.0
    chunk_seconds: list[float] = field(default_factory=list)
    first_chunk_tokens: int = 1
    error: str | None = None

    @property
    def ttft_seconds(self) -> float:
        """From before the connection was opened to the first content."""
        return self.chunk_seconds[0] - self.start_seconds

    @property
    def end_to_end_seconds(self) -> float:
        """From before the connection was opened to the end of the stream."""
        return self.end_seconds - self.start_seconds

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first chunk, or None where there was no more than that."""
        tokens = self.output_tokens - self.first_chunk_tokens
        return (self.chunk_seconds[-1] - self.chunk_seconds[0]) / tokens if tokens > 0 else None


class Client:
    """Sends completions to one server."""

    def __init__(self, url: str, api_key: str | None = None, timeout_seconds: float = 600) -> None:
        self._socket_path = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit("http://localhost" if self._socket_path else url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {url!r} is no http:// or https:// address, and no unix: path")
        secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        if self._ssl is not None and is_loopback(url):  # its certificate is for another name
            self._ssl.check_hostname = False
            self._ssl.verify_mode = ssl.CERT_NONE
        self._timeout_seconds = timeout_seconds
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"{authorization}Content-Type: application/json\r\n"
            "Accept: text/event-stream\r\nConnection: close\r\n"
        )

    async def stream(self, job: Job) -> Result:
        """Send one request and read its stream to the end. Failures are in the result, never raised."""
        body = orjson.dumps(job.body)
        request = f"{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        result = Result(job.prompt_tokens, start_seconds=time.perf_counter())
        loop = asyncio.get_running_loop()
        transport = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                if self._socket_path:
                    transport, protocol = await loop.create_unix_connection(
                        lambda: StreamProtocol(request, result), self._socket_path
                    )
                else:
                    transport, protocol = await loop.create_connection(
                        lambda: StreamProtocol(request, result), self._host, self._port, ssl=self._ssl
                    )
                await protocol.closed
        except TimeoutError:
            result.error = f"no end within {self._timeout_seconds:g} s"
        except OSError as error:
            result.error = str(error)
        finally:
            if transport is not None:
                transport.abort()
        result.end_seconds = result.end_seconds or time.perf_counter()
        return result


class StreamProtocol(asyncio.Protocol):
    """Writes the request, then notes when content arrives. `closed` resolves when no more comes."""

    def __init__(self, request: bytes, result: Result) -> None:
        self._request = request
        self._result = result
        self._response = ResponseReader()
        self._events = b""
        self._done = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self._response.feed(data)
            if self._response.status == 200:
                self._read_events(body, now)
            else:
                self._events += body
        except (ValueError, KeyError, TypeError, IndexError) as error:
            self._result.error = f"unreadable response: {error!r}"
        if self._done or self._response.complete or self._result.error is not None:
            self._close(now)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._result.error = self._result.error or str(exc) or type(exc).__name__
        self._close(time.perf_counter())

    def _close(self, now: float) -> None:
        if self.closed.done():
            return
        result = self._result
        result.end_seconds = now
        if self._response.status != 200:
            result.error = result.error or f"HTTP {self._response.status}: {_error_message(self._events)}"
        elif not self._done:
            result.error = result.error or "the stream ended without [DONE]"
        elif not result.chunk_seconds:
            result.error = result.error or "the stream had no content"
        self.closed.set_result(None)

    def _read_events(self, body: bytes, now: float) -> None:
        *events, self._events = (self._events + body.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._done = True
            elif event.startswith(b"data: "):
                self._read_chunk(orjson.loads(event[6:]), now)

    def _read_chunk(self, chunk: dict[str, object], now: float) -> None:
        result = self._result
        if error := chunk.get("error"):
            result.error = str(error.get("message") if isinstance(error, dict) else error)
            return
        if isinstance(usage := chunk.get("usage"), dict):
            result.prompt_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
        choices = chunk["choices"]
        if not isinstance(choices, list):
            raise TypeError("choices is no list")
        # The last chunk may be the only one: text that shows nothing (control tokens) still was generated.
        if choices and (choices[0]["text"] or (choices[0]["finish_reason"] and not result.chunk_seconds)):
            if not result.chunk_seconds:
                result.first_chunk_tokens = max(1, result.output_tokens)
            result.chunk_seconds.append(now)


class ResponseReader:
    """Reads one HTTP/1.1 response as it arrives: `feed` returns the body bytes that became whole."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self._buffer = bytearray()
        self._chunked = False
        self._left: int | None = None  # body bytes still to come; None: until the connection closes

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the connection. Raises ValueError for what is no HTTP/1.1."""
        self._buffer += data
        if self.status == 0 and not self._read_head():
            return b""
        if self._chunked:
            return self._read_chunks()
        body = bytes(self._buffer)
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(body)
            self.complete = self._left <= 0
        return body

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, status = status_line.split(" ")[:2]
        if not version.startswith("HTTP/1."):
            raise ValueError(f"not HTTP/1.1: {status_line[:40]!r}")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = int(status)
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if "content-length" in headers:
            self._left = int(headers["content-length"])
        return True

    def _read_chunks(self) -> bytes:
        buffer, body, at = self._buffer, bytearray(), 0
        while not self.complete:
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(buffer[at:line_end].split(b";")[0], 16)
            start = line_end + 2
            if len(buffer) < start + size + 2:
                break
            body += buffer[start : start + size]
            at = start + size + 2
            self.complete = size == 0
        del buffer[:at]
        return bytes(body)


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "no body"
