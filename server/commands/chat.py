"""`monoloop chat`: a conversation in the terminal, with a running server or with an engine in this process.

Works without a terminal too: every line of a piped input is one turn, and only answers are printed.
"""

import asyncio
import sys
from contextlib import suppress

import httpx
from pydantic import Field
from rich.console import Console

from server.commands.chat_backends import Backend, ChatError, LocalBackend, ServerBackend
from server.commands.client import ClientSettings, default_url
from server.commands.conversation import Chat, SamplingOptions, is_command
from server.flags import parse_flags


class ChatSettings(SamplingOptions, ClientSettings):
    """Talk to a model in the terminal."""

    url: str = Field(
        default_factory=default_url,
        description="base URL of the server; default: http://127.0.0.1:8000, or host and port as MONOLOOP_* "
        "or the file of MONOLOOP_CONFIG set them; if no server is there, the model runs in this process",
    )
    model: str | None = Field(
        None, description="model to talk to; default: the server's first, or the default model"
    )
    local: bool = Field(
        False,
        description="run the model in this process, with the engine's settings from MONOLOOP_* and the file "
        "of MONOLOOP_CONFIG",
    )
    system: str | None = Field(None, description="system prompt")


def main(arguments: list[str]) -> int:
    """Chat until the input ends; return the exit code. Raises SettingsError."""
    return run(parse_flags(arguments, "chat", ChatSettings))


def run(settings: ChatSettings) -> int:
    """Talk until the input ends. Returns the exit status: 1 if there was no server or a turn failed.

    Raises SettingsError for a setting that an engine in this process cannot meet.
    """
    console, errors = Console(), Console(stderr=True)
    options = settings.model_dump(include={*SamplingOptions.model_fields}, exclude_none=True)
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(_find_backend(settings, errors))
        except ChatError as error:
            errors.print(str(error), style="red", markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            return 130
        try:
            chat = Chat(backend, console, errors, settings.system, options)
            if sys.stdin.isatty():
                chat.note(f"{backend.name} · /help for commands")
                _talk(chat, runner)
            else:
                _answer_lines(chat, runner)
        except KeyboardInterrupt:
            errors.print()
            return 130
        finally:
            runner.run(backend.close())
    return 1 if chat.num_failures else 0


async def _find_backend(settings: ChatSettings, errors: Console) -> Backend:
    if settings.local:
        return await LocalBackend.start(settings.model, errors)
    try:
        return await ServerBackend.connect(settings)
    except httpx.ConnectError as error:
        if "url" in settings.model_fields_set:
            raise ChatError(f"no server answers at {settings.url}") from error
        errors.print(
            f"no server at {settings.url}: the model runs in this process", style="dim", highlight=False
        )
        return await LocalBackend.start(settings.model, errors)


def _talk(chat: Chat, runner: asyncio.Runner) -> None:
    """Answer what is typed until Ctrl-D or /bye. A second Ctrl-C in a row raises KeyboardInterrupt."""
    from server.commands.line_editor import Interrupted, LineEditor, open_history

    editor = LineEditor(open_history())
    was_interrupted = False
    while True:
        try:
            text = runner.run(editor.read())
        except EOFError:
            return
        except Interrupted:
            if was_interrupted:
                raise KeyboardInterrupt from None
            was_interrupted = True
            chat.note("Ctrl-C again, or Ctrl-D, ends")
            continue
        was_interrupted = False
        if is_command(text):
            if not chat.command(text):
                return
        elif text.strip():
            with suppress(KeyboardInterrupt):
                runner.run(editor.undisturbed(chat.say(text)))


def _answer_lines(chat: Chat, runner: asyncio.Runner) -> None:
    """Answer each line of a pipe."""
    for line in sys.stdin:
        if is_command(line.rstrip("\n")):
            if not chat.command(line):
                return
        elif line.strip():
            with suppress(KeyboardInterrupt):
                runner.run(chat.say(line.rstrip("\n")))
