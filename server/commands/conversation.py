"""The conversation of `monoloop chat`: turns, commands, and how an answer is printed."""

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from server.commands.chat_backends import Backend, ChatError, Messages, Piece
from server.commands.word_wrap import WordWrap
from server.flags import did_you_mean

# A model may write any character. Those that steer a terminal are not passed on.
UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


AUTHORS = "default: what the model's authors chose"


class SamplingOptions(BaseModel):
    """What can be set of each answer. None: what the model's authors chose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float | None = Field(None, ge=0, le=2, description=f"0: the most likely token; {AUTHORS}")
    top_p: float | None = Field(
        None, gt=0, le=1, description=f"sample from the likeliest tokens of this total probability; {AUTHORS}"
    )
    top_k: int | None = Field(
        None, ge=0, lt=2**31, description=f"sample from the N likeliest tokens; {AUTHORS}"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description=f"sample from tokens at least X times as likely as the first; {AUTHORS}"
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description=f"above 1: tokens that occurred become less likely; {AUTHORS}"
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="seed of the sampling; default: a new one for each answer"
    )
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="most tokens of an answer; default: what fits into the context"
    )


HELP = f"""/set NAME VALUE  change an option of the answers ({", ".join(SamplingOptions.model_fields)});
                 without VALUE back to the default, without NAME show what is set
/system TEXT     set the system prompt and start over; without TEXT show it
/clear           forget the conversation
/bye             leave, as Ctrl-D does; Ctrl-C stops an answer
Several lines: begin and end with \"\"\", end a line with \\, or press Alt-Enter. A pasted text is
one message."""


def is_command(text: str) -> bool:
    """Check that a typed text is a command. A text of several lines that begins with a path is none."""
    return text.startswith("/") and ("\n" not in text or text.startswith("/system"))


class Chat:
    """The conversation so far, and what a person can type into it.

    On a terminal answers are wrapped between words, and followed by their speed.
    """

    def __init__(
        self,
        backend: Backend,
        console: Console,
        errors: Console,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._backend = backend
        self._console = console
        self._errors = errors
        self._system = system
        self._options: dict[str, Any] = {**(options or {})}
        self._clock = clock
        self._turns: Messages = []
        self.num_failures = 0

    def command(self, line: str) -> bool:
        """Carry out a line that starts with a slash; False ends the chat."""
        name, _, text = line.strip().partition(" ")
        match name:
            case "/bye" | "/exit" | "/quit":
                return False
            case "/clear":
                self._turns.clear()
                self.note("forgotten")
            case "/set":
                self._set(text.strip())
            case "/system" if text.strip():
                self._system = text.strip()
                self._turns.clear()
                self.note("a new conversation with this system prompt")
            case "/system":
                self.note(self._system or "no system prompt")
            case "/help":
                self.note(HELP)
            case _:
                self.note(f"{name} is no command\n{HELP}")
        return True

    async def say(self, text: str) -> None:
        """Send one turn and print the answer as it comes. A stopped answer stays in the conversation."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        question = {"role": "user", "content": text}
        answer: list[str] = []
        wrap = WordWrap(lambda: self._console.width) if self._console.is_terminal else None
        first = last = self._clock()
        end = Piece()
        try:
            messages = [*system, *self._turns, question]
            async with aclosing(self._backend.answer(messages, self._options)) as pieces:
                async for piece in pieces:
                    if piece.text:
                        last = self._clock()
                        first = first if answer else last
                        answer.append(piece.text)
                        shown = piece.text.translate(UNPRINTABLE)
                        self._write(shown if wrap is None else wrap.feed(shown))
                    end = Piece("", piece.finish_reason or end.finish_reason, piece.num_tokens)
        except ChatError as error:
            self.num_failures += 1
            self._write("" if wrap is None else wrap.end())
            self._errors.print(str(error), style="red", markup=False, highlight=False)
        finally:
            if answer:
                self._write(("" if wrap is None else wrap.end()) + "\n")
                self._turns += [question, {"role": "assistant", "content": "".join(answer)}]
        self._note_end(end, last - first)

    def note(self, text: str) -> None:
        """Print a line that is no part of the conversation."""
        self._errors.print(text, style="dim", markup=False, highlight=False)

    def _note_end(self, end: Piece, seconds: float) -> None:
        """Print what the last piece says: the speed after the first token, and that the answer was cut."""
        if self._console.is_terminal and end.num_tokens and end.num_tokens > 1 and seconds > 0:
            rate = (end.num_tokens - 1) / seconds
            self.note(f"{end.num_tokens} tokens, {rate:.1f} tokens/s")
        if end.finish_reason == "length":
            limit = self._options.get("max_tokens")
            reason = (
                "the context is full, or the server allows no longer answer"
                if limit is None
                else f"it has reached max_tokens, {limit}; /set max_tokens N allows more"
            )
            self.note(f"the answer was cut: {reason}")

    def _set(self, text: str) -> None:
        """Carry out `/set`, `/set NAME` or `/set NAME VALUE`."""
        name, _, value = text.partition(" ")
        if not name:
            self.note(
                ", ".join(f"{name} {value}" for name, value in self._options.items()) or "nothing is set"
            )
        elif name not in SamplingOptions.model_fields:
            hint = did_you_mean(name, SamplingOptions.model_fields)
            self.note(f"{name} cannot be set, but {', '.join(SamplingOptions.model_fields)}{hint}")
        elif not value:
            self._options.pop(name, None)
            self.note(f"{name}: the default")
        else:
            try:
                self._options[name] = getattr(SamplingOptions.model_validate({name: value}), name)
            except ValidationError as error:
                self.note(f"{name}: {error.errors()[0]['msg']} (got {value!r:.100})")
            else:
                self.note(f"{name} {self._options[name]}")

    def _write(self, text: str) -> None:
        self._console.file.write(text)  # as it is: no markup, tabs stay tabs
        self._console.file.flush()
