"""An engine without a model: it says what the prompt tells it to, with delays and faults on order.

The prompt's characters are its token ids, so that submit() can read the prompt back. Words in it give orders:
`tokens=20 size=3 delay=0.01 fail=3 die=3 hang say:text to say`.
"""

import asyncio
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from engine import ModelInfo
from engine.config import EngineConfig
from engine.constraints.grammar_source import translate
from engine.errors import Draining, EngineDead, EngineError, InvalidRequest, QueueFull, StepFailed
from engine.outputs import FinishReason, OutputToken, TextDelta, TokenPiece
from engine.readouts import PooledHidden, PromptLogprobs, Readout, RewardScore
from engine.request import Request
from engine.schedule.sequence import RequestChain
from engine.stats import (
    EngineObserver,
    EngineStats,
    EngineView,
    NullObserver,
    PageCells,
    Phase,
    RequestTimes,
    SequenceView,
)
from engine.stream import RequestStream
from engine.text.infill import InfillTokens
from engine.text.reasoning import ReasoningTracker

VOCAB_SIZE = 0x110000
MODEL_NAME = "fake-model"


class FakePieces:
    """The bytes of a token are its character's."""

    strips_first_space = False

    def piece(self, token_id: int) -> TokenPiece:
        return TokenPiece(token_id, chr(token_id).encode(), False)

    def is_special(self, token_id: int) -> bool:
        return False

    def added_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        return {}

    def settled(self, token_ids: list[int], text: str, *, skip_special_tokens: bool) -> str:
        return text


class FakeTokenizer:
    """A token is a character."""

    max_prompt_chars = 8192
    infill: InfillTokens | None = None
    takes_system = takes_system_anywhere = True
    chat_template: str | None = "{{ messages }}{{ tools }}"
    reserved_variables = frozenset(("messages", "chat_template", "tokenize", "bos_token"))
    added_tokens: ClassVar[dict[str, int]] = {}
    response_template: dict[str, Any] | None = None
    special_tokens: ClassVar[dict[str, str | None]] = {
        "bos_token": "\x02",
        "eos_token": "\x00",
        "pad_token": None,
        "unk_token": None,
    }

    @property
    def tool_template(self) -> str | None:
        return self.chat_template

    def __init__(self) -> None:
        self.decoder = self
        self.pieces = FakePieces()
        self.num_encodes = 0
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    async def encode_batch(self, texts: list[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.num_encodes += 1
        return [
            ([2] if add_special_tokens and text.startswith("bos") else []) + [ord(char) for char in text]
            for text in texts
        ]

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.chats.append((messages, options))
        text = " ".join("".join(message["content"]) for message in messages)
        if "bad template" in text:
            raise InvalidRequest("The chat template refuses this: no", "messages")
        if "slow template" in text:
            print("A slow template is rendered.", file=sys.stderr, flush=True)
            await asyncio.sleep(30)
        return [ord(char) for char in text]

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return ["".join(map(chr, ids)) for ids in sequences]

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    async def decode_prompt(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return await self.decode(ids)

    async def token_strs(self, ids: list[int]) -> list[str]:
        return list(map(chr, ids))


def fake_token(request: Request, number: int, said: str, offset: int, *, is_shown: bool) -> OutputToken:
    """The token of what is said; its log-probability is its number, and `-inf` where it says "never"."""
    piece = TokenPiece(ord(said[0]), said.encode(), False)
    num_top = request.sampling.logprobs
    if num_top is None:
        return OutputToken(piece, offset, None, (), is_shown)
    logprob = -math.inf if "never" in said else -number / 8 - (request.sampling.seed or 0) % 7
    others = [(TokenPiece(i, bytes([0xF0, 0x9F, i]), False), -1.0 - i) for i in range(1, num_top)]
    return OutputToken(piece, offset, logprob, ((piece, logprob), *others)[:num_top], is_shown)


def fake_prompt(request: Request) -> tuple[OutputToken, ...]:
    """The tokens of a prompt, if it returns logprobs; 65 is the likeliest in every place but the first."""
    readout = request.readout(PromptLogprobs)
    if readout is None:
        return ()
    num_top = readout.num_top
    tokens = []
    for place, token_id in enumerate(request.prompt_token_ids):
        piece = TokenPiece(token_id, chr(token_id).encode(), False)
        top = [(TokenPiece(65 + i, bytes([65 + i]), False), -0.5 - i) for i in range(num_top)]
        tokens.append(
            OutputToken(piece, place, -place / 4, tuple(top), is_shown=True, rank=40 + place)
            if place
            else OutputToken(piece, place, None, (), is_shown=True)
        )
    return tuple(tokens)


class FakeStream:
    """What submit() returns; each __anext__ takes everything that waits."""

    end, when_ended = RequestStream.end, RequestStream.when_ended

    def __init__(self, request: Request, abort: Callable[[], None]) -> None:
        self.request_id = request.request_id
        self.request = request
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.ttft_seconds: float | None = None
        self.decode_seconds = 0.0
        self.readouts: dict[type[Readout], np.ndarray] = {}
        self.waiting: list[TextDelta] = []
        self.error: EngineError | None = None
        self.news = asyncio.Event()
        self._tracker = ReasoningTracker({}, request.sampling.reasoning)
        self._abort = abort
        self._is_over = False
        self._times: RequestTimes | None = None
        self._on_end: Callable[[RequestTimes], None] | None = None
        self._started = time.perf_counter()
        self._take: Callable[[TextDelta], bool] | None = None

    def offer_to(self, take: Callable[[TextDelta], bool] | None) -> None:
        self._take = take

    def readout(self, kind: type[Readout]) -> Any:
        return self.readouts[kind]

    def abort(self) -> None:
        self._abort()

    def times(self, reason: FinishReason) -> RequestTimes:
        """It waits in no queue, and all its time is decoding, which begins with the first token."""
        seconds = time.perf_counter() - self._started
        return RequestTimes(
            finish_reason=reason,
            prompt_tokens=self.num_prompt_tokens,
            generation_tokens=self.num_output_tokens,
            max_tokens=self.request.sampling.max_tokens,
            preemptions=0,
            end_to_end_seconds=seconds,
            queue_seconds=0.0,
            prefill_seconds=0.0 if self.num_output_tokens else None,
            decode_seconds=seconds if self.num_output_tokens else None,
            arrival_seconds=self._started,
        )

    def put(self, delta: TextDelta) -> None:
        if self.ttft_seconds is None:
            self.ttft_seconds = 0.0125
        else:
            self.decode_seconds += 0.0031
        self.num_output_tokens += delta.num_tokens
        if not self._tracker.is_answer:
            self._tracker.advance(delta.text)
            self.num_reasoning_tokens = 0 if self._tracker.is_undecided else self.num_output_tokens
        if self._take is not None and not self.waiting and self._take(delta):
            return
        self.waiting.append(delta)
        if not self._tracker.is_undecided or delta.finish_reason is not None:
            self.news.set()  # else it is held, as what may begin reasoning is

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.news.set()

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self

    async def __anext__(self) -> TextDelta:
        if self._is_over:
            raise StopAsyncIteration
        await self.news.wait()
        self.news.clear()
        if self.waiting:
            taken, self.waiting = self.waiting, []
            text = "".join(delta.text for delta in taken)
            last = taken[-1]
            self._is_over = last.finish_reason is not None
            if self.error is not None:
                self.news.set()
            num_tokens = sum(delta.num_tokens for delta in taken)
            tokens = tuple(token for delta in taken for token in delta.tokens)
            prompt_tokens = taken[0].prompt_tokens
            return TextDelta(text, num_tokens, last.finish_reason, last.stop_reason, tokens, prompt_tokens)
        self._is_over = True
        assert self.error is not None
        raise self.error

    async def collect(self) -> TextDelta:
        text, num_tokens = "", 0
        tokens: tuple[OutputToken, ...] = ()
        prompt_tokens: tuple[OutputToken, ...] = ()
        try:
            async for delta in self:
                text += delta.text
                tokens += delta.tokens
                prompt_tokens += delta.prompt_tokens
                num_tokens += delta.num_tokens
        finally:
            self.abort()
        return TextDelta(text, num_tokens, delta.finish_reason, delta.stop_reason, tokens, prompt_tokens)


class FakeEngine:
    """The public contract of engine.Engine. It has both heads, unless `num_labels` says which one."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        observer: EngineObserver | None = None,
        num_labels: int | None = None,
    ) -> None:
        self.has_both_heads = num_labels is None
        self.config = config or EngineConfig(max_num_seqs=16)
        self.observer = observer or NullObserver()
        self.tokenizer = FakeTokenizer()
        self.model = ModelInfo(
            name=MODEL_NAME,
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            eos_token_ids=(0,),
            generation_defaults={},
            dtype="float32",
            device="cpu",
            num_pages=1000,
            page_size=16,
            created=1_700_000_000,
            num_labels=num_labels or 0,
            pooling="last" if self.config.pooling == "last" else "mean",
            matryoshka=True,
        )
        self.profile: Any = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.live: dict[str, tuple[FakeStream, asyncio.Task[None]]] = {}
        self.is_full = False
        self.is_silent = False
        self.num_cached_tokens = 0
        self.is_draining = False
        self.is_stopped = False
        self._died = asyncio.Event()
        self._num_tokens = 0

    @property
    def is_alive(self) -> bool:
        return not self._died.is_set()

    def check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDead("The engine has stopped after a fault.")

    def submit(self, request: Request) -> FakeStream:
        self.check_alive()
        if self.is_draining:
            raise Draining("The server is shutting down and takes no new requests.")
        if self.is_full:
            raise QueueFull("Too many requests wait.", retry_after_seconds=7)
        if not self.has_both_heads:
            request.check_heads(self.model.num_labels)
        self.requests.append(request)
        stream = FakeStream(request, lambda: self._abort(request.request_id))
        stream.num_cached_tokens = self.num_cached_tokens
        task = asyncio.create_task(self._speak(stream))
        self.live[request.request_id] = (stream, task)
        return stream

    async def prepare(self, requests: list[Request]) -> list[Request]:
        """Grammars are only read: the fake model says what it likes."""
        for request in requests:
            if (grammar := request.sampling.grammar) is not None:
                try:
                    translate(grammar, {})
                except ValueError as error:
                    raise InvalidRequest(f"Invalid {grammar.label}: {error}", grammar.param) from error
        return requests

    def submit_group(self, requests: list[Request], chain: RequestChain | None = None) -> list[FakeStream]:
        return [self.submit(request) for request in requests]

    def begin_chain(self) -> RequestChain:
        return RequestChain()

    def end_chain(self, chain: RequestChain) -> None:
        pass

    async def _speak(self, stream: FakeStream) -> None:
        orders = "".join(map(chr, stream.request.prompt_token_ids))
        started = time.perf_counter()

        def order(name: str, default: float) -> float:
            found = re.search(rf"{name}=([\d.]+)", orders)
            return float(found[1]) if found else default

        said = orders.partition("say:")[2]
        pieces = (
            list(said) if said else [f"t{i} " * int(order("size", 1)) for i in range(int(order("tokens", 5)))]
        )
        limit = stream.request.sampling.max_tokens
        fail, die, delay = order("fail", -1), order("die", -1), order("delay", 0)
        request, offset = stream.request, 0
        if "hang" in orders:
            await asyncio.Event().wait()
        first = math.nan if "nan" in orders else request.prompt_token_ids[0]
        sizes = {PooledHidden: self.model.hidden_size, RewardScore: self.model.num_labels or 1}
        stream.readouts = {
            kind: np.array([first, *range(1, size)], np.float32) for kind, size in sizes.items()
        }
        if limit == 0:
            del self.live[stream.request_id]
            stream.put(TextDelta("", 0, FinishReason.LENGTH, None, (), fake_prompt(request)))
        for number, piece in enumerate(pieces[:limit]):
            await asyncio.sleep(delay)
            if number == fail:
                self._end(stream, StepFailed("Computing this request failed."))
                return
            if number == die:
                self.die()
                return
            is_last = number == min(len(pieces), limit) - 1
            finish = (FinishReason.LENGTH if len(pieces) > limit else FinishReason.STOP) if is_last else None
            self._num_tokens += 1
            self.observer.step_finished(delay, 1, 1)
            self.observer.loop_lag(0.0)
            if number:
                self.observer.inter_token(delay, 1)
            else:
                self.observer.first_token(time.perf_counter() - started)
            if self.is_silent:
                piece = ""
            whole = piece or " "
            stop = next((text for text in stream.request.sampling.stop if text in piece), None)
            if stop is not None:
                shown = stop if stream.request.sampling.include_stop_str_in_output else ""
                piece, finish, is_last = piece.partition(stop)[0] + shown, FinishReason.STOP, True
            if is_last:
                del self.live[stream.request_id]
            tokens: tuple[OutputToken, ...] = ()
            prompt_tokens = () if number else fake_prompt(request)
            if request.return_tokens or request.sampling.logprobs is not None:
                tokens = (fake_token(request, number, whole, offset, is_shown=bool(piece)),)
                offset += len(piece)
            stream.put(TextDelta(piece, 1, finish, stop, tokens, prompt_tokens))
            if is_last:
                break
        times = stream.times(FinishReason.STOP)
        stream.end(times)
        self.observer.request_finished(times)

    def _abort(self, request_id: str) -> None:
        if request_id in self.live:
            stream, task = self.live[request_id]
            task.cancel()
            self.aborted.append(request_id)
            self._end(stream, EngineError("The request was aborted."))

    def _end(self, stream: FakeStream, error: EngineError) -> None:
        self.live.pop(stream.request_id, None)
        stream.fail(error)
        stream.end(stream.times(FinishReason.ERROR))

    def die(self) -> None:
        """The step loop ends by a fault."""
        self._died.set()
        self._end_all(EngineDead("The engine has stopped after a fault."))

    def _end_all(self, error: EngineError) -> None:
        for stream, task in list(self.live.values()):
            if task is not asyncio.current_task():
                task.cancel()
            self._end(stream, error)

    async def wait_dead(self) -> None:
        await self._died.wait()

    async def drain(self, timeout_seconds: float | None = None) -> None:
        self.is_draining = True
        tasks = [task for _, task in self.live.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds)
        self._end_all(Draining("The server is shutting down."))

    async def stop(self) -> None:
        self.is_draining = self.is_stopped = True
        self._end_all(Draining("The server is shutting down."))

    def view(self, max_sequences: int, max_cells: int) -> EngineView:
        """A page for each running request, and as many sequences."""
        sequences = [
            SequenceView(
                id=stream.request_id,
                phase=Phase.DECODE if stream.num_output_tokens else Phase.PREFILL,
                prompt_tokens=stream.num_prompt_tokens,
                cached_tokens=stream.num_cached_tokens,
                computed_tokens=stream.num_prompt_tokens + stream.num_output_tokens,
                output_tokens=stream.num_output_tokens,
                max_tokens=stream.request.sampling.max_tokens,
                pages=1,
                age_seconds=0.0,
            )
            for stream, _ in list(self.live.values())[:max_sequences]
        ]
        used = [int(page < len(self.live)) for page in range(min(1000, max_cells))]
        nothing = [0] * len(used)
        return EngineView(self.stats(), sequences, PageCells(1, used, nothing, nothing))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            waiting=0,
            pages_used=len(self.live),
            pages_cached=0,
            pages_free=1000 - len(self.live),
            pages_predicted=sum(
                -(-(stream.num_prompt_tokens + stream.request.sampling.max_tokens) // 16)
                for stream, _ in self.live.values()
            ),
            page_size=16,
            preemptions_total=0,
            prompt_tokens_total=sum(len(request.prompt_token_ids) for request in self.requests),
            cached_prompt_tokens_total=0,
            queried_prompt_tokens_total=sum(len(request.prompt_token_ids) for request in self.requests),
            evicted_pages_total=0,
            generation_tokens_total=self._num_tokens,
            steps_total=self._num_tokens,
            mixed_steps_total=0,
            constrained_steps_total=0,
            corrupted_requests_total=0,
            drafts_total=0,
            accepted_drafts_total=0,
            device_idle_seconds_total=0.0,
            device_idle_share=0.0,
            loop_lag_seconds=0.0,
            alive=self.is_alive,
            draining=self.is_draining,
        )
