"""`monoloop chat`: a conversation in the terminal, with a running server or with an engine in this process.

Works without a terminal too: every line of a piped input is one turn, and only answers are printed.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import orjson
from pydantic import Field
from rich.console import Console

from server.commands.client import ClientSettings, default_url
from server.flags import parse_flags

if TYPE_CHECKING:
    from engine import Engine

HELP = """/reset          forget the conversation
/system TEXT    set the system prompt and start over; without TEXT show it
/exit           leave, as Ctrl-D does; Ctrl-C stops an answer"""

# A model may write any character. Those that steer a terminal are not passed on.
UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Messages = list[dict[str, str]]


class ChatSettings(ClientSettings):
    """Talk to a model in the terminal."""

    url: str = Field(
        default_factory=default_url,
        description="base URL of the server; default: port MONOLOOP_PORT, else 8000, of this machine; if no "
        "server is there, the model runs in this process",
    )
    model: str | None = Field(
        None, description="model to talk to; default: the server's first, or the default model"
    )
    local: bool = Field(
        False, description="run the model in this process, with the engine's settings from MONOLOOP_*"
    )
    system: str | None = Field(None, description="system prompt")
    temperature: float | None = Field(None, ge=0, le=2, description="default: what the model's authors chose")
    max_tokens: int | None = Field(
        None, ge=1, description="longest answer; default: what fits into the context"
    )


class ChatError(Exception):
    """The answer could not be had. The message is for the person at the terminal."""


class Backend(Protocol):
    """Somebody who answers."""

    name: str

    def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece. Raises ChatError."""

    async def close(self) -> None:
        """Free what was taken."""


class ServerBackend:
    """A server that speaks the OpenAI API."""

    def __init__(self, settings: ChatSettings, model: str) -> None:
        self.name = model
        self._options = _options(settings) | {"model": model, "stream": True}
        self._client = _client(settings)

    @classmethod
    async def connect(cls, settings: ChatSettings) -> "ServerBackend":
        """Find the server and a model it serves. Raises ChatError, or httpx.ConnectError if none answers."""
        try:
            async with _client(settings) as client:
                response = await client.get("/v1/models")
                response.raise_for_status()
                model = settings.model or str(response.json()["data"][0]["id"])
        except httpx.ConnectError:
            raise
        except httpx.HTTPStatusError as error:
            raise ChatError(f"{settings.url}: {_error_message(error.response.content)}") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            raise ChatError(f"{settings.url} does not answer as an OpenAI API: {error}") from error
        return cls(settings, model)

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece. Raises ChatError."""
        body = self._options | {"messages": messages}
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(_error_message(await response.aread()))
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: ") and (text := _content(orjson.loads(line[6:]))):
                        yield text
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ChatError(f"the connection broke: {error!r}") from error
        raise ChatError("the connection ended in the middle of the answer")

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


class LocalBackend:
    """An engine in this process."""

    def __init__(self, engine: "Engine", settings: ChatSettings) -> None:
        self.name = engine.model.name
        self._engine = engine
        self._options = _options(settings)

    @classmethod
    async def start(cls, settings: ChatSettings, console: Console) -> "LocalBackend":
        """Load the model. Raises ChatError, or SettingsError for a setting that cannot be met."""
        from engine import Engine
        from engine.errors import FetchFailed, ModelError
        from server.settings import load

        found = load({"model": settings.model} if settings.model is not None else {})
        try:
            with console.status("starting …") as status:
                engine = await Engine.start(found.engine, on_progress=lambda line: status.update(line))
        except FetchFailed as error:
            raise ChatError(str(error)) from error
        except (ModelError, ValueError) as error:
            raise found.explain(error) from error
        return cls(engine, settings)

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece. Raises ChatError."""
        from engine.errors import EngineError
        from server.convert import make_requests
        from server.limits import Limits
        from server.prompt import encode_chat
        from server.schema.chat import ChatRequest

        model = self._engine.model
        limits = Limits.of(model, self._engine.config)
        wire = ChatRequest.model_validate(self._options | {"messages": messages})
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
                yield delta.text
        except EngineError as error:
            raise ChatError(str(error)) from error
        finally:
            if stream is not None:
                stream.abort()

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.stop()


class Chat:
    """The conversation so far, and what a person can type into it."""

    def __init__(self, backend: Backend, console: Console, errors: Console, system: str | None) -> None:
        self._backend = backend
        self._console = console
        self._errors = errors
        self._system = system
        self._turns: Messages = []
        self.num_failures = 0

    def command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; False ends the chat."""
        name, _, text = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._turns.clear()
                self._note("forgotten")
            case "/system" if text.strip():
                self._system = text.strip()
                self._turns.clear()
                self._note("a new conversation with this system prompt")
            case "/system":
                self._note(self._system or "no system prompt")
            case "/help":
                self._note(HELP)
            case _:
                self._note(f"{name} is no command\n{HELP}")
        return True

    async def say(self, text: str) -> None:
        """Send one turn and print the answer as it comes. A stopped answer stays in the conversation."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        answer: list[str] = []
        try:
            async with aclosing(self._backend.answer([*system, *self._turns, question])) as pieces:
                async for piece in pieces:
                    answer.append(piece)
                    self._write(piece.translate(UNPRINTABLE))
        except ChatError as error:
            self.num_failures += 1
            self._errors.print(str(error), style="red", markup=False, highlight=False)
        finally:
            if answer:
                self._write("\n")
                self._turns += [question, {"role": "assistant", "content": "".join(answer)}]

    def _write(self, text: str) -> None:
        self._console.file.write(text)  # as it is: no wrapping, no markup, tabs stay tabs
        self._console.file.flush()

    def _note(self, text: str) -> None:
        self._errors.print(text, style="dim", markup=False, highlight=False)


def main(arguments: list[str]) -> int:
    """Chat until the input ends; return the exit code. Raises SettingsError."""
    return run(parse_flags(arguments, "chat", ChatSettings))


def run(settings: ChatSettings) -> int:
    """Talk until the input ends. Returns the exit status: 1 if there was no server or a turn failed.

    Raises SettingsError for a setting that an engine in this process cannot meet.
    """
    console, errors = Console(), Console(stderr=True)
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(_find_backend(settings, errors))
        except ChatError as error:
            errors.print(str(error), style="red", markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            return 130
        try:
            chat = Chat(backend, console, errors, settings.system)
            if sys.stdin.isatty():
                errors.print(
                    f"{backend.name} · /help for commands", style="dim", markup=False, highlight=False
                )
            for line in _lines(console):
                if line.startswith("/"):
                    if not chat.command(line):
                        break
                elif line.strip():
                    with suppress(KeyboardInterrupt):
                        runner.run(chat.say(line))
        except KeyboardInterrupt:
            errors.print()
            return 130
        finally:
            runner.run(backend.close())
    return 1 if chat.num_failures else 0


async def _find_backend(settings: ChatSettings, errors: Console) -> Backend:
    if settings.local:
        return await LocalBackend.start(settings, errors)
    try:
        return await ServerBackend.connect(settings)
    except httpx.ConnectError as error:
        if "url" in settings.model_fields_set:
            raise ChatError(f"no server answers at {settings.url}") from error
        errors.print(
            f"no server at {settings.url}: the model runs in this process", style="dim", highlight=False
        )
        return await LocalBackend.start(settings, errors)


def _lines(console: Console) -> Iterator[str]:
    """Yield the typed lines until Ctrl-D, or those of a pipe. A second Ctrl-C in a row is raised."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # editing and history, where the platform has it
        import readline  # noqa: F401
    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            console.print("\nCtrl-C again, or Ctrl-D, ends", style="dim")
            continue
        interrupted = False
        yield line


def _client(settings: ChatSettings) -> httpx.AsyncClient:
    # The first token of a long prompt on a busy server may take minutes; a connection should not.
    return httpx.AsyncClient(
        base_url=settings.url, headers=settings.headers, timeout=httpx.Timeout(600, connect=5)
    )


def _options(settings: ChatSettings) -> dict[str, Any]:
    options = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
    return {name: value for name, value in options.items() if value is not None}


def _content(chunk: dict[str, Any]) -> str:
    """The text of one stream chunk. Raises ChatError for an error event."""
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message") if isinstance(error, dict) else error))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace") or "an error without a message"
