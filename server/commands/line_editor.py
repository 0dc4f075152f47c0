"""The keyboard's side of `monoloop chat`: an editor for messages of several lines, with history."""

import asyncio
import os
import re
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output

# A message in triple quotes, after a command such as /system if it is one's text.
OPENING = re.compile(r'\s*(/\w+\s+)?"""')
QUOTED = re.compile(r'\s*(/\w+\s+)?"""\n?(.*?)\n?"""\s*', re.DOTALL)


class Interrupted(Exception):
    """Ctrl-C was pressed at the prompt."""


class LineEditor:
    """Reads messages from a terminal. Enter sends; what goes on in a next line is described in `/help`."""

    def __init__(self, history: History, keyboard: Input | None = None, screen: Output | None = None) -> None:
        self._keyboard = keyboard or create_input()
        bindings = KeyBindings()
        bindings.add("enter")(on_enter)
        bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=". ",
            key_bindings=bindings,
            history=history,
            input=self._keyboard,
            output=screen or create_output(always_prefer_tty=True),
            interrupt_exception=Interrupted,
        )

    async def read(self) -> str:
        """Return the next message. Raises EOFError after Ctrl-D, Interrupted after Ctrl-C."""
        return message_of(await self._session.prompt_async())

    async def undisturbed(self, answer: Coroutine[Any, Any, None]) -> None:
        """Await an answer that is printed meanwhile: keys do not show and are dropped, Ctrl-C cancels it."""
        task = asyncio.ensure_future(answer)

        def on_keys() -> None:
            if any(press.key == Keys.ControlC for press in self._keyboard.read_keys()):
                task.cancel()

        with self._keyboard.raw_mode(), self._keyboard.attach(on_keys), suppress(asyncio.CancelledError):
            await task


def on_enter(event: KeyPressEvent) -> None:
    """Send the message, or begin a new line if it goes on."""
    buffer = event.current_buffer
    if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    elif is_open(buffer.text):
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def is_open(text: str) -> bool:
    """Check that a text begins with triple quotes that are not closed."""
    return OPENING.match(text) is not None and text.count('"""') == 1


def message_of(text: str) -> str:
    """Return a typed text without the triple quotes around it."""
    quoted = QUOTED.fullmatch(text)
    return (quoted[1] or "") + quoted[2] if quoted else text.rstrip("\n")


def open_history() -> History:
    """Return the history of earlier chats, a file that only its user can read, or else one in memory."""
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        file = Path(state) / "monoloop" / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return InMemoryHistory()
    return FileHistory(str(file))
