"""The terminal chat: against a scripted server, against a stand-in engine, in a pipe and in a terminal."""

import asyncio
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine.config import EngineConfig
from engine.errors import FetchFailed, ModelError
from server import cli
from server.commands.chat import ChatSettings, run
from server.commands.chat_backends import ChatError, LocalBackend, Messages, Piece
from server.commands.conversation import Chat, is_command
from tests.server.fake_engine import FakeEngine


class ScriptedServer:
    """An OpenAI API in a thread: answers with `chunks`, or with `status` and an error."""

    def __init__(self) -> None:
        self.chunks = ["Hel", "lo"]
        self.status = 200
        self.ends_properly = True
        self.finish_reason = "stop"
        self.pause_seconds = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.disconnects = 0
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self) -> "ScriptedServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            try:
                await self._answer(reader, writer)
                writer.close()
                await writer.wait_closed()
            except (ConnectionError, asyncio.IncompleteReadError):
                self.disconnects += 1
                writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        await asyncio.gather(*connections)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.authorizations += [line for line in head.split("\r\n") if line.startswith("authorization")]
        if head.startswith("get "):
            body = b'{"data": [{"id": "scripted-model"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {self.status} X\r\nConnection: close\r\n\r\n".encode())
        if self.status != 200:
            writer.write(b'{"error": {"message": "the context is full"}}')
            return
        writer.write(b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n')
        for text in self.chunks:
            chunk = {"choices": [{"index": 0, "delta": {"content": text}}]}
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(self.pause_seconds)
        if self.ends_properly:
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]}
            usage = {"choices": [], "usage": {"completion_tokens": len(self.chunks)}}
            for event in (end, usage):
                writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as scripted:
        yield scripted


def piped(monkeypatch: pytest.MonkeyPatch, text: str, settings: ChatSettings) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(settings)


def test_a_pipe_gets_the_answers_and_nothing_else(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ChatSettings(url=server.url, api_key="k", system="Be brief.", temperature=0.5, max_tokens=9)
    assert piped(monkeypatch, "Hi\n\nAgain\n", settings) == 0
    assert capsys.readouterr().out == "Hello\nHello\n"
    first, second = server.bodies
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Again"},
    ]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("scripted-model", 0.5, 9)
    assert set(server.authorizations) == {"authorization: bearer k"}


def test_commands(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "a\n/clear\nb\n/system Sing.\nc\n/system\n/help\n/what\n/bye\nnever sent\n"
    assert piped(monkeypatch, lines, ChatSettings(url=server.url)) == 0
    assert [body["messages"] for body in server.bodies] == [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "b"}],
        [{"role": "system", "content": "Sing."}, {"role": "user", "content": "c"}],
    ]
    notes = capsys.readouterr().err
    for words in ("forgotten", "Sing.", "/clear ", "/what is no command"):
        assert words in notes


def test_set_changes_the_options_of_the_answers_that_follow(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "/set temperature 0.5\n/set seed 7\na\n/set temperature\n/set max_tokens 3\n/set\nb\n"
        "/set temprature 1\n/set top_p 2\n/set top_k x\nc\n"
    )
    assert piped(monkeypatch, lines, ChatSettings(url=server.url, top_k=9)) == 0
    names = ("temperature", "top_p", "top_k", "seed", "max_tokens")
    assert [{name: body[name] for name in names if name in body} for body in server.bodies] == [
        {"temperature": 0.5, "top_k": 9, "seed": 7},
        {"top_k": 9, "seed": 7, "max_tokens": 3},
        {"top_k": 9, "seed": 7, "max_tokens": 3},
    ]
    notes = " ".join(capsys.readouterr().err.split())
    for words in (
        "top_k 9, seed 7, max_tokens 3",
        "did you mean temperature?",
        "top_p: Input",
        "top_k: Input",
    ):
        assert words in notes


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(2, "it has reached max_tokens, 2; /set"), (None, "the context is full")]
)
def test_an_answer_that_was_cut_says_so(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    max_tokens: int | None,
    reason: str,
) -> None:
    server.finish_reason = "length"
    assert piped(monkeypatch, "a\n", ChatSettings(url=server.url, max_tokens=max_tokens)) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello\n"
    assert f"the answer was cut: {reason}" in " ".join(shown.err.split())
    server.finish_reason = "stop"
    assert piped(monkeypatch, "a\n", ChatSettings(url=server.url)) == 0
    assert capsys.readouterr().err == ""


def test_a_model_that_the_server_does_not_have_ends_the_chat(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, "a\n", ChatSettings(url=server.url, model="scripted")) == 1
    assert not server.bodies
    error = " ".join(capsys.readouterr().err.split())
    assert "serves scripted-model; did you mean scripted-model?" in error


def test_an_error_is_shown_and_its_turn_forgotten(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = 400
    assert piped(monkeypatch, "a\nb\n", ChatSettings(url=server.url)) == 1
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("the context is full") == 2


def test_a_broken_stream_is_an_error_after_its_text(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ends_properly = False
    assert piped(monkeypatch, "a\n", ChatSettings(url=server.url)) == 1
    shown = capsys.readouterr()
    assert shown.out == "Hello\n"
    assert "in the middle of the answer" in shown.err


def test_an_answer_without_text_is_no_turn(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.chunks = []
    assert piped(monkeypatch, "a\nb\n", ChatSettings(url=server.url)) == 0
    assert capsys.readouterr().out == ""
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]


def test_what_steers_a_terminal_is_not_printed(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.chunks = ["\x1b]0;title\x07", "[red]:smile:[/red]\t", "\x9b31m", "é\n", "\r."]
    assert piped(monkeypatch, "a\n", ChatSettings(url=server.url)) == 0
    assert capsys.readouterr().out == "]0;title[red]:smile:[/red]\t31mé\n.\n"


def test_a_named_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer() as gone:
        url = gone.url
    assert piped(monkeypatch, "a\n", ChatSettings(url=url)) == 1
    assert f"no server answers at {url}" in capsys.readouterr().err


class StandIn:
    """A backend that says what it is told to, or fails."""

    name = "stand-in"

    def __init__(self, *answers: list[str | ChatError]) -> None:
        self.answers = list(answers)
        self.asked: list[Messages] = []

    async def answer(self, messages: Messages, options: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        self.asked.append(messages)
        answer = self.answers.pop(0)
        for number, piece in enumerate(answer, 1):
            if isinstance(piece, ChatError):
                raise piece
            yield Piece(piece, "stop" if number == len(answer) else None, number)

    async def close(self) -> None:
        pass


async def test_half_an_answer_stays_in_the_conversation() -> None:
    backend = StandIn(["half", ChatError("fault")], ["whole"], [ChatError("nothing")], ["last"])
    chat = Chat(backend, Console(file=io.StringIO()), Console(file=io.StringIO()), None)
    for text in ("1", "2", "3", "4"):
        await chat.say(text)
    assert [message["content"] for message in backend.asked[-1]] == ["1", "half", "2", "whole", "4"]
    assert chat.num_failures == 2


async def test_on_a_terminal_words_stay_whole_and_the_speed_is_shown() -> None:
    backend = StandIn(["one ", "two ", "thr", "ee ", "four"])
    output, errors = io.StringIO(), io.StringIO()
    ticks = iter(range(100))
    chat = Chat(
        backend,
        Console(file=output, force_terminal=True, width=10),
        Console(file=errors, width=80),
        clock=lambda: next(ticks) * 0.5,
    )
    await chat.say("a")
    assert output.getvalue() == "one two\nthree four\n"
    assert errors.getvalue() == "5 tokens, 2.0 tokens/s\n", "four of them in 2 s after the first"


def test_a_text_of_several_lines_that_begins_with_a_path_is_no_command() -> None:
    assert is_command("/bye")
    assert is_command("/system Be\nbrief.")
    assert not is_command("/usr/bin/env python\nwhat is this?")
    assert not is_command("a /bye")


PROMPT = "\x1b[?2004h"  # bracketed paste is switched on: the editor reads


def read_until(terminal: int, words: str, seconds: float = 20) -> str:
    """What the program in the terminal prints, until `words` are in it or time is up."""
    text = ""
    deadline = time.monotonic() + seconds
    while words not in text and (left := deadline - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                text += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # Linux: the program has closed its side
                break
    return text


def test_in_a_terminal_control_c_stops_the_answer_and_not_the_program(
    server: ScriptedServer, tmp_path: Path
) -> None:
    server.chunks = ["one "] + ["more "] * 2000
    server.pause_seconds = 0.01
    program = f"import sys; from server import cli; sys.exit(cli.main(['chat', '--url', {server.url!r}]))"
    environment = os.environ | {
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # there is no terminal that answers
        "XDG_STATE_HOME": str(tmp_path),
    }
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env=environment,
    ) as process:
        os.close(slave)
        try:
            assert PROMPT in read_until(master, PROMPT)
            os.write(master, b"\x1b[200~count\nslowly\x1b[201~\r")
            assert "more more" in read_until(master, "more more")
            os.write(master, b"typed meanwhile\r\x03")
            shown = read_until(master, PROMPT)
            assert PROMPT in shown and "typed" not in shown
            server.chunks = ["done"]
            os.write(master, b"stop\r")
            assert PROMPT in read_until(master, PROMPT).split("done")[1]
            os.write(master, b"\x03")
            assert PROMPT in read_until(master, PROMPT).split("Ctrl-C again")[1]
            os.write(master, b"\x03")
            assert process.wait(20) == 130
        finally:
            process.kill()
            os.close(master)
    assert server.disconnects == 1, "the stopped answer's connection was closed"
    turns = server.bodies[-1]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert (turns[0]["content"], turns[2]["content"]) == ("count\nslowly", "stop")
    assert turns[1]["content"].startswith("one more ")


async def test_an_engine_in_the_process_answers_as_a_server_would() -> None:
    engine = FakeEngine()
    backend = LocalBackend(engine)  # type: ignore[arg-type]
    output, errors = io.StringIO(), io.StringIO()
    options = {"temperature": 0.0, "max_tokens": 3}
    chat = Chat(backend, Console(file=output), Console(file=errors), "Be brief.", options)
    await chat.say("tokens=20")
    assert output.getvalue() == "t0 t1 t2 \n"
    messages, _ = engine.tokenizer.chats[0]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.max_tokens) == (0, 3)
    await chat.say("bad template")
    assert "The chat template refuses this" in errors.getvalue()


async def test_a_stopped_answer_of_the_engine_is_aborted() -> None:
    engine = FakeEngine()
    backend = LocalBackend(engine)  # type: ignore[arg-type]
    chat = Chat(backend, Console(file=io.StringIO()), Console(file=io.StringIO()), None)
    answer = asyncio.create_task(chat.say("tokens=1000 delay=0.001"))
    for _ in range(1000):
        await asyncio.sleep(0.005)
        if engine.requests:
            break
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert engine.aborted == ["chat-0"]


def test_a_model_that_is_not_there_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise ModelError("there is no model called missing")

    monkeypatch.setattr("engine.Engine.start", refuse)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert cli.main(["chat", "--local", "--model", "missing"]) == 2
    assert "--model: there is no model called missing" in capsys.readouterr().err


def test_a_model_that_cannot_be_fetched_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise FetchFailed("no network")

    monkeypatch.setattr("engine.Engine.start", refuse)
    assert piped(monkeypatch, "a\n", ChatSettings(local=True)) == 1
    assert "no network" in capsys.readouterr().err


def test_an_engine_in_the_process_has_the_settings_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    async def refuse(config: EngineConfig, **_: object) -> None:
        seen.append(config)
        raise FetchFailed("no network")

    file = tmp_path / "settings.yaml"
    file.write_text("model: some/model\nmax_model_len: 64\n")
    monkeypatch.setenv("MONOLOOP_CONFIG", str(file))
    monkeypatch.setattr("engine.Engine.start", refuse)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    for arguments in ([], ["--model", "another/model"]):
        assert cli.main(["chat", "--local", *arguments]) == 1
    assert [config.model for config in seen] == ["some/model", "another/model"]
    assert {config.max_model_len for config in seen} == {64}


def test_a_wrong_setting_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOLOOP_PAGE_SIZE", "17")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert cli.main(["chat", "--local"]) == 2
    assert "MONOLOOP_PAGE_SIZE" in capsys.readouterr().err
