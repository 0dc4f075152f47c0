"""Where the answers of `monoloop chat` come from: a server over HTTP, or an engine in this process."""

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx
import orjson
from rich.console import Console

from server.commands.client import NO_SOCKS, ClientSettings
from server.flags import did_you_mean

if TYPE_CHECKING:
    from engine import Engine

Messages = list[dict[str, str]]


class ChatError(Exception):
    """There is no answer. The message is for the person at the terminal."""


class Piece(NamedTuple):
    """A part of an answer. `finish_reason` and the answer's `num_tokens` are known at the end, if at all."""

    text: str = ""
    finish_reason: str | None = None
    num_tokens: int | None = None


class Backend(Protocol):
    """A model that answers."""

    name: str

    def answer(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yield the next turn piece by piece. `options` are fields of a chat request. Raises ChatError."""

    async def close(self) -> None:
        """Free what was taken."""


class ServerBackend:
    """A server that speaks the OpenAI API."""

    def __init__(self, settings: ClientSettings, model: str) -> None:
        self.name = model
        self._client = http_client(settings)

    @classmethod
    async def connect(cls, settings: ClientSettings) -> "ServerBackend":
        """Find the server and the model. Raises ChatError, or httpx.ConnectError if no server answers."""
        try:
            async with http_client(settings) as client:
                response = await client.get("/v1/models")
                response.raise_for_status()
                names = [str(model["id"]) for model in response.json()["data"]]
                model = settings.model or names[0]
        except httpx.ConnectError:
            raise
        except ImportError as error:  # httpx's, for a kind of proxy
            raise ChatError(NO_SOCKS) from error
        except httpx.HTTPStatusError as error:
            raise ChatError(f"{settings.url}: {error_message(error.response.content)}") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{settings.url} does not answer as an OpenAI API: {error}") from error
        if model not in names:
            hint = did_you_mean(model, names)
            raise ChatError(f"--model {model}: {settings.url} serves {', '.join(names) or 'no model'}{hint}")
        return cls(settings, model)

    async def answer(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yield the next turn piece by piece. Raises ChatError."""
        body = {
            **options,
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(error_message(await response.aread()))
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield piece_of(orjson.loads(line[6:]))
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ChatError(f"the connection broke: {error!r}") from error
        raise ChatError("the connection ended in the middle of the answer")

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


class LocalBackend:
    """An engine in this process."""

    def __init__(self, engine: "Engine") -> None:
        self.name = engine.model.name
        self._engine = engine

    @classmethod
    async def start(cls, model: str | None, console: Console) -> "LocalBackend":
        """Load the model. Raises ChatError, or SettingsError for a setting that cannot be met."""
        from engine import Engine
        from engine.errors import FetchFailed, ModelError
        from server.settings import config_file, load

        found = load({"model": model} if model is not None else {}, config_file())
        try:
            with console.status("starting …") as status:
                engine = await Engine.start(found.engine, on_progress=lambda line: status.update(line))
        except FetchFailed as error:
            raise ChatError(str(error)) from error
        except (ModelError, ValueError) as error:
            raise found.explain(error) from error
        return cls(engine)

    async def answer(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yield the next turn piece by piece. Raises ChatError."""
        from engine.errors import EngineError
        from server.convert import make_requests
        from server.limits import Limits
        from server.prompt import encode_chat
        from server.schema.chat import ChatRequest

        model = self._engine.model
        limits = Limits.of(model, self._engine.config)
        wire = ChatRequest.model_validate({**options, "messages": messages})
        stream = None
        try:
            prompt = await encode_chat(wire, self._engine.tokenizer, limits)
            request, *_ = await make_requests(
                wire,
                [prompt],
                "chat",
                limits,
                default_max_tokens=model.generation_defaults.get("max_new_tokens"),
                prompt_param="messages",
            )
            [request] = await self._engine.prepare([request])
            stream = self._engine.submit(request)
            async for delta in stream:
                yield Piece(delta.text, delta.finish_reason, stream.num_output_tokens)
        except EngineError as error:
            raise ChatError(str(error)) from error
        finally:
            if stream is not None:
                stream.abort()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.stop()


def http_client(settings: ClientSettings) -> httpx.AsyncClient:
    """Return a client of the server in the settings."""
    # The first token of a long prompt on a busy server may take minutes; a connection should not.
    return httpx.AsyncClient(
        timeout=httpx.Timeout(600, connect=5), **settings.http_options(httpx.AsyncHTTPTransport)
    )


def piece_of(chunk: dict[str, Any]) -> Piece:
    """Return one stream chunk as a piece. Raises ChatError for an error event."""
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message") if isinstance(error, dict) else error))
    text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    reasons = [choice["finish_reason"] for choice in chunk["choices"] if choice.get("finish_reason")]
    usage = chunk.get("usage") or {}
    return Piece(text, reasons[0] if reasons else None, usage.get("completion_tokens"))


def error_message(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "an error without a message"
