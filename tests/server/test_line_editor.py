"""The chat's line editor, driven by the keys of a pipe: no terminal, no timing."""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def keyboard() -> Iterator[Any]:
    from prompt_toolkit.input import create_pipe_input

    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def editor(keyboard: Any) -> Any:
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import DummyOutput

    from server.commands.line_editor import LineEditor

    return LineEditor(InMemoryHistory(), keyboard, DummyOutput())


ENTER, UP, CONTROL_C, CONTROL_D = "\r", "\x1b[A", "\x03", "\x04"


def paste(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello" + ENTER, "hello"),
        (paste("one\ntwo\r\nthree\n") + ENTER, "one\ntwo\nthree"),
        (paste("echo a \\\n  b") + ENTER, "echo a \\\n  b"),
        ("one\\" + ENTER + "two" + ENTER, "one\ntwo"),
        ('"""one' + ENTER + ENTER + 'two"""' + ENTER, "one\n\ntwo"),
        ('"""' + ENTER + "one" + ENTER + '"""' + ENTER, "one"),
        ('/system """one' + ENTER + 'two"""' + ENTER, "/system one\ntwo"),
        ('say """' + ENTER, 'say """'),
        ('"""a""" and """b"""!' + ENTER, '"""a""" and """b"""!'),
        ("one\x1b\rtwo" + ENTER, "one\ntwo"),
        ("/help" + ENTER, "/help"),
    ],
)
async def test_keys_make_a_message(editor: Any, keyboard: Any, keys: str, message: str) -> None:
    keyboard.send_text(keys)
    assert await editor.read() == message


async def test_what_was_typed_before_comes_back(editor: Any, keyboard: Any) -> None:
    keyboard.send_text("first" + ENTER)
    assert await editor.read() == "first"
    keyboard.send_text(UP + "!" + ENTER)
    assert await editor.read() == "first!"


async def test_control_d_and_control_c_at_the_prompt(editor: Any, keyboard: Any) -> None:
    from server.commands.line_editor import Interrupted

    keyboard.send_text("half" + CONTROL_C)
    with pytest.raises(Interrupted):
        await editor.read()
    keyboard.send_text(CONTROL_D)
    with pytest.raises(EOFError):
        await editor.read()


async def test_keys_during_an_answer_are_dropped(editor: Any, keyboard: Any) -> None:
    async def answer() -> None:
        keyboard.send_text("mixed in" + ENTER)
        await keyboard_was_read.wait()

    keyboard_was_read = asyncio.Event()
    read_keys = keyboard.read_keys

    def noticed() -> Any:
        keyboard_was_read.set()
        return read_keys()

    keyboard.read_keys = noticed
    await editor.undisturbed(answer())
    keyboard.send_text("next" + ENTER)
    assert await editor.read() == "next"


async def test_control_c_stops_an_answer_and_nothing_else(editor: Any, keyboard: Any) -> None:
    ends = []

    async def answer() -> None:
        keyboard.send_text("x" + CONTROL_C)
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    await editor.undisturbed(answer())
    assert ends == ["cancelled"]
    keyboard.send_text("next" + ENTER)
    assert await editor.read() == "next"


def test_the_history_is_a_file_of_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from server.commands.line_editor import open_history

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = open_history()
    assert isinstance(history, FileHistory)
    history.store_string("one\ntwo")
    file = tmp_path / "monoloop" / "chat_history"
    assert stat.S_IMODE(os.stat(file).st_mode) & 0o077 == 0
    reopened = open_history()
    assert isinstance(reopened, FileHistory)
    assert list(reopened.load_history_strings()) == ["one\ntwo"]
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "taken"))
    assert isinstance(open_history(), InMemoryHistory)
