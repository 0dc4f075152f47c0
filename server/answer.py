"""From submitted requests to one answer: what chat and text completions share, streamed or not."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from engine import search_beams
from engine.errors import Draining, QueueTimeout, RequestTimeout
from engine.outputs import FinishReason, TextDelta
from engine.request import BeamParams, Request
from server.errors import DeadlinePassed, RequestAborted
from server.ids import new_id
from server.limits import Limits, check_num_answers
from server.parsing.answer_format import ParserSetup
from server.parsing.output import ParsedDelta, ParsedStream
from server.schema.chat import ChatFinish
from server.schema.refused_fields import UnsupportedField
from server.schema.sampling import CompletionTokensDetails, Finish, PromptTokensDetails, Usage
from server.version import VERSION
from server.watch import ClientGone, SlowClient

if TYPE_CHECKING:
    from engine import Engine, ModelInfo, RequestStream

Delta = TextDelta | ParsedDelta

# How an answer ended, in the log, by its error.
ENDS: dict[type[BaseException], str] = {
    QueueTimeout: "overload",
    RequestTimeout: "timeout",
    DeadlinePassed: "timeout",
    RequestAborted: "abort",
    Draining: "drain",
    SlowClient: "slow_client",
    ClientGone: "client_left",
    asyncio.CancelledError: "drain",
}

# Serializing a token with 20 top logprobs takes up to 0.2 ms.
MAX_TOKENS_ON_LOOP = 16
# Serializing an answer without tokens takes 25 µs.
MAX_ANSWERS_ON_LOOP = 64


class Counts(NamedTuple):
    """Tokens of an answer: `cached` ones are among the prompt's, those of `reasoning` among `completion`."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


def usage_of(counts: Counts) -> Usage:
    """Return counts as the `usage` of an answer."""
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=counts.reasoning),
    )


class Answer:
    """One answer: the fields that all chunks of its response share, its requests and their streams."""

    def __init__(self, prefix: str, model: str, info: "ModelInfo") -> None:
        self.id = f"{prefix}{new_id()}"
        self.created = int(time.time())
        self.model = model
        self.fingerprint = fingerprint(info)
        self.requests: Sequence[Request] = ()
        self.streams: Sequence[RequestStream | ParsedStream] = ()
        self.n = 1
        self.is_parsed = False
        self.end = "running"

    def __str__(self) -> str:
        """For the log: its id, its model, its tokens, in and out, its times, and how it ended."""
        counts, ttft, itl = self.counts(), self._ttft_seconds(), self._itl_seconds()
        cached = f" ({counts.cached} cached)" if counts.cached else ""
        times = "" if ttft is None else f" ttft={1e3 * ttft:.0f}ms"
        times += "" if itl is None else f" itl={1e3 * itl:.1f}ms"
        tokens = f"{counts.prompt}+{counts.completion} tokens{cached}"
        return f"{self.id} {self.model} {tokens}{times} ended={self.end}"

    def log_fields(self) -> dict[str, str | float | None]:
        """For the log in JSON: what the line says, by name; null for times that there are none of."""
        counts = self.counts()
        return {
            "id": self.id,
            "model": self.model,
            "prompt_tokens": counts.prompt,
            "cached_tokens": counts.cached,
            "output_tokens": counts.completion,
            "ttft_seconds": rounded(self._ttft_seconds()),
            "itl_seconds": rounded(self._itl_seconds()),
            "ended": self.end,
        }

    def note_finish(self, reasons: Iterable[FinishReason | None]) -> None:
        """Note that all its texts are complete, and why they ended."""
        self.end = ",".join(sorted({reason for reason in reasons if reason is not None}))

    def note_error(self, error: BaseException) -> None:
        """Note that it ended by an error."""
        self.end = next((ENDS[kind] for kind in type(error).__mro__ if kind in ENDS), "error")

    async def collect(self) -> "list[Delta]":
        """Wait for all texts, each as one delta."""
        deltas = await collect_all(self.streams)
        self.note_finish(delta.finish_reason for delta in deltas)
        return deltas

    def counts(self) -> Counts:
        """Token counts from the engine's ledger; the n samples of a prompt count its tokens once."""
        prompt = cached = completion = reasoning = 0
        for index, stream in enumerate(self.streams):
            if index % self.n == 0:
                prompt += stream.num_prompt_tokens
                cached += stream.num_cached_tokens
            completion += stream.num_output_tokens
            reasoning += stream.num_reasoning_tokens
        return Counts(prompt, cached, completion, reasoning)

    def _ttft_seconds(self) -> float | None:
        """Return the seconds from the arrival at the engine to the first token of any text; None without."""
        return min(
            (seconds for stream in self.streams if (seconds := stream.ttft_seconds) is not None), default=None
        )

    def _itl_seconds(self) -> float | None:
        """Return the mean of the seconds between two tokens of a text; None if no text has two."""
        gaps = sum(max(0, stream.num_output_tokens - 1) for stream in self.streams if stream.decode_seconds)
        return sum(stream.decode_seconds for stream in self.streams) / gaps if gaps else None

    def usage(self) -> Usage:
        """Return the token counts as the `usage` of the answer."""
        return usage_of(self.counts())

    def prompt_ids(self, index: int) -> list[int]:
        """Token ids of the prompt of an answer's choice."""
        return list(self.requests[index].prompt_token_ids)

    async def submit(
        self, engine: "Engine", requests: Sequence[Request], n: int, setup: ParserSetup | None = None
    ) -> None:
        """Submit the requests: all of them, or none. Every `n` of them share a prompt.

        With `setup` the streams are parsed: their deltas are ParsedDeltas.
        """
        if setup is not None:
            requests = setup.configure(requests)
        requests = await engine.prepare(requests)
        streams: list[RequestStream] = []
        try:
            for first in range(0, len(requests), n):
                if first:  # a thousand prompts at once take the loop a tenth of a second
                    await asyncio.sleep(0)
                streams += engine.submit_group(requests[first : first + n])
        except BaseException:
            abort_all(streams)
            raise
        self.requests, self.n = requests, n
        self.streams = streams if setup is None else [setup.wrap(stream) for stream in streams]
        self.is_parsed = setup is not None

    def submit_beams(
        self, engine: "Engine", requests: Sequence[Request], n: int, beams: BeamParams, limits: Limits
    ) -> None:
        """Start a beam search for the best `n` answers to each prompt; every `n` of the requests share one.

        Raises InvalidRequest, UnsupportedField.
        """
        sampling = requests[0].sampling
        if sampling.grammar is not None:
            param = sampling.grammar.param
            raise UnsupportedField(f"{param} cannot be used together with use_beam_search.", param)
        if requests[0].readouts:
            raise UnsupportedField("Beam search tells no log-probabilities of the prompt.", "use_beam_search")
        check_num_answers(beams.width * len(requests) // n, limits, "use_beam_search")
        streams: list[RequestStream] = []
        try:
            for first in range(0, len(requests), n):
                streams += search_beams(engine, requests[first], beams, n)
        except BaseException:
            abort_all(streams)
            raise
        self.requests, self.n, self.streams = requests, n, streams


def rounded(seconds: float | None) -> float | None:
    """Return a time in whole microseconds."""
    return None if seconds is None else round(seconds, 6)


def fingerprint(info: "ModelInfo") -> str:
    """Return a hash of what answers depend on beside the request: version, model, formats, device."""
    formats = info.dtype, info.quantization or "dense", info.kv_dtype
    parts = "\n".join((VERSION, info.name, *formats, info.device))
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:10]}"


FINISH: dict[FinishReason | None, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def finish_of(delta: Delta) -> Finish:
    """The reason a client sees; an abort or a fault is an error and never gets here."""
    return FINISH[delta.finish_reason]


def chat_finish_of(delta: Delta) -> ChatFinish:
    """Return the reason in chat: calls of tools, or stop if the request named the tool."""
    is_calling = isinstance(delta, ParsedDelta) and delta.has_calls and not delta.is_named
    return "tool_calls" if is_calling else finish_of(delta)


def abort_all(streams: Sequence["RequestStream | ParsedStream"]) -> None:
    """End what still runs; nothing happens to streams that have ended."""
    for stream in streams:
        stream.abort()


async def collect_all(streams: Sequence["RequestStream | ParsedStream"]) -> list[Delta]:
    """Wait for every stream; the first that fails ends all."""
    tasks: list[asyncio.Future[Delta]] = [asyncio.ensure_future(stream.collect()) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        abort_all(streams)


async def render(write: Callable[[], str], deltas: Sequence[Delta]) -> Response:
    """The response with the JSON that `write` makes: in a thread if there are many answers, or tokens."""
    is_long = len(deltas) > MAX_ANSWERS_ON_LOOP or is_heavy(deltas)
    body = await asyncio.to_thread(write) if is_long else write()
    return Response(body, media_type="application/json")


def is_heavy(deltas: Sequence[Delta]) -> bool:
    """Check that deltas carry too many tokens to be written on the loop: those of a prompt, or a backlog."""
    return (
        any(delta.prompt_tokens for delta in deltas)
        or sum(len(delta.tokens) for delta in deltas) > MAX_TOKENS_ON_LOOP
    )
