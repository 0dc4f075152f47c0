"""Runs a tokenizer in threads, so that the loop can await it: a megabyte of text takes a second."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from engine.errors import Draining, QueueTimeout, StepFailed
from engine.text.detokenizer import BatchDecoder
from engine.text.infill import InfillTokens
from engine.text.template_sandbox import Rendering
from engine.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_BATCH_TEXTS = 64  # in one job of a thread
RENDER_SECONDS = 10.0
TIMEOUT_SECONDS = 120.0


class TokenizerPool:
    """Runs a tokenizer in a few threads, so that the loop can await it.

    `pieces` has the bytes of each token; `infill` the tokens for filling in the middle, if there are any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_threads: int,
        max_model_len: int,
        render_seconds: float = RENDER_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._render_seconds = render_seconds
        self._timeout_seconds = timeout_seconds
        self._waiting: set[asyncio.Future[Any]] = set()
        self._num_done = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        # No longer text can fit: this one consists of the longest token.
        self.max_prompt_chars = max_model_len * tokenizer.max_token_chars
        self.pieces = tokenizer.pieces
        self.infill = InfillTokens.of(tokenizer.backend)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if there is none."""
        return self._tokenizer.chat_template

    @property
    def tool_template(self) -> str | None:
        """The source of the chat template for requests with tools; None if there is none."""
        return self._tokenizer.tool_template or self._tokenizer.chat_template

    @property
    def takes_system(self) -> bool:
        """True if the chat template renders a system message at the beginning."""
        return self._tokenizer.takes_system

    @property
    def takes_system_anywhere(self) -> bool:
        """True if the chat template renders system messages in their places, wherever they are."""
        return self._tokenizer.takes_system_anywhere

    @property
    def reserved_variables(self) -> frozenset[str]:
        """Names that a client must not set for the chat template."""
        return self._tokenizer.reserved_variables

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens added to the vocabulary, special or not: the control tokens."""
        return self._tokenizer.added_tokens

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The tokenizer's own description of how to parse answers; None if it has none."""
        return self._tokenizer.response_template

    async def response_parser(
        self, prompt: list[int], tools: list[dict[str, Any]] | None
    ) -> Callable[[], Any]:
        """Return a function that makes parsers of answers to `prompt`, from the response template."""
        return await self._run(lambda: self._tokenizer.response_parser(prompt, tools))

    @property
    def special_tokens(self) -> dict[str, str | None]:
        """The texts of special tokens, by transformers' names; None for those that do not exist."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self._tokenizer, name) for name in names}

    @property
    def decoder(self) -> BatchDecoder:
        """The decoder for the detokenizer."""
        decoder: BatchDecoder = self._tokenizer.backend
        return decoder

    async def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text; `add_special_tokens` adds those that begin a text.

        Many texts are encoded in several jobs, so that other requests get a turn in between.
        """
        ids: list[list[int]] = []
        while len(ids) < len(texts):
            batch = texts[len(ids) : len(ids) + MAX_BATCH_TEXTS]
            encode = partial(self._tokenizer.encode_batch, batch, add_special_tokens=add_special_tokens)
            ids += await self._run(encode)
        return ids

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Raises InvalidRequest when the template refuses it or takes too long. The thread is then free again,
        as it is after the caller is cancelled.
        """
        rendering = Rendering(self._render_seconds)

        def encode() -> list[int]:
            pieces = self._tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
                max_chars=self.max_prompt_chars,
                rendering=rendering,
            )
            return self._tokenizer.encode_rendered(pieces)

        try:
            return await self._run(encode)
        finally:
            rendering.cancel()

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        return await self._run(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def decode_prompt(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a prompt, without an incomplete last character: the output's text has that."""
        text = await self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self.pieces.settled(token_ids, text, skip_special_tokens=skip_special_tokens)

    async def token_strs(self, token_ids: list[int]) -> list[str]:
        """Return the vocabulary's spelling of each id."""
        return await self._run(lambda: self._tokenizer.token_strs(token_ids))

    def progress(self) -> object:
        """Return the number of jobs done, or None if no caller waits for one."""
        return self._num_done if self._waiting else None

    async def _run(self, function: Callable[[], T]) -> T:
        """Run a function on one of the threads. Raises QueueTimeout if that takes too long, and Draining."""
        if self._is_closed:
            raise Draining("The server is shutting down.")
        future = asyncio.get_running_loop().run_in_executor(self._threads, _without_panic, function)
        self._waiting.add(future)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await future
        except TimeoutError:
            raise QueueTimeout(f"The text was not tokenized within {self._timeout_seconds:g} s.") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Draining("The server is shutting down.") from None  # close() has cancelled the future
        finally:
            self._waiting.remove(future)
            self._num_done += not future.cancelled()

    def close(self) -> None:
        """Stop the threads after their current work, which is for no caller any more."""
        self._is_closed = True
        for future in self._waiting:
            future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _without_panic(function: Callable[[], T]) -> T:
    """Call a function; a panic in Rust, which is not an Exception, is raised as StepFailed."""
    try:
        return function()
    except Exception:
        raise
    except BaseException as panic:
        raise StepFailed("The tokenizer failed on this request's text.") from panic
