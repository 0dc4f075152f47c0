"""The requests between submit() and their last delta. Everything here runs on the event loop.

A request is queued in the scheduler. The step loop hands in the output of each step; its tokens go to the
detokenizer thread in one job, and their text comes back to the mailbox that the request's stream reads from.
"""

import asyncio
import secrets
import time
from collections import abc
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.constraints.prepare import is_prepared
from engine.counters import Counters
from engine.delivery import Delivery
from engine.errors import (
    Draining,
    EngineError,
    InvalidRequest,
    QueueTimeout,
    RequestTimeout,
    StepFailed,
)
from engine.listener import StepListener
from engine.mailbox import Mailbox
from engine.model_info import ModelInfo
from engine.outputs import FinishReason, StepOutput, StepPlan, logprobs_by_sequence
from engine.readouts import PromptLogprobs
from engine.request import Request
from engine.schedule.rows import Progress
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import RequestChain, Sequence
from engine.stats import EngineObserver, RequestTimes
from engine.stream import RequestStream
from engine.text.detokenizer import Decoded
from engine.text.tokenizer_pool import TokenizerPool


@dataclass(slots=True)
class ActiveRequest:
    """A request from submit() to its last delta. Times are seconds of time.perf_counter()."""

    sequence: Sequence
    stream: RequestStream
    mailbox: Mailbox
    arrival: float
    first_token: float | None = None
    last_token: float | None = None

    def times(self, reason: FinishReason) -> RequestTimes:
        """Return the durations of its stages, for a request that ends now."""
        now = time.perf_counter()
        scheduled, first = self.sequence.first_scheduled_seconds, self.first_token
        return RequestTimes(
            finish_reason=reason,
            prompt_tokens=self.sequence.num_prompt_tokens,
            generation_tokens=self.stream.num_output_tokens,
            max_tokens=self.sequence.request.sampling.max_tokens,
            preemptions=self.sequence.num_preemptions,
            end_to_end_seconds=now - self.arrival,
            queue_seconds=None if scheduled is None else scheduled - self.arrival,
            prefill_seconds=None if first is None or scheduled is None else first - scheduled,
            decode_seconds=None if first is None else (self.last_token or first) - first,
            arrival_seconds=self.arrival,
        )


class ActiveRequests:
    """Queues requests, delivers their text, and ends each of them once. Its length is their number."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelInfo,
        tokenizer: TokenizerPool,
        scheduler: Scheduler,
        counters: Counters,
        observer: EngineObserver,
        listeners: abc.Sequence[StepListener],
        wake_up: abc.Callable[[], None],
    ) -> None:
        """`wake_up` has the step loop plan a step, which applies marks and sends jobs of `delivery`."""
        self.delivery = Delivery(
            tokenizer.decoder,
            tokenizer.pieces,
            config.max_chunks_per_second,
            self._deliver,
            self._on_undecodable,
        )
        self.is_draining = False
        self._queue_timeout_seconds = config.queue_timeout_seconds
        self._model = model
        self._scheduler = scheduler
        self._counters = counters
        self._observer = observer
        self._listeners = listeners
        self._wake_up = wake_up
        self._active: dict[int, ActiveRequest] = {}  # by the id of the sequence
        self._chains: set[RequestChain] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._active)

    # Beginning

    def submit(
        self, requests: abc.Sequence[Request], chain: RequestChain | None = None
    ) -> list[RequestStream]:
        """Check and queue requests with one prompt, all or none. Raises as Engine.submit_group() does."""
        self._check_open(chain)
        for request in requests:
            if chain is None or chain.first is None:  # else the new tokens are the model's own
                request.check(self._model.vocab_size)
                request.check_heads(self._model.num_labels)
            if not is_prepared(request):
                raise ValueError("a request with constraints goes through prepare() before it is submitted")
        now = time.perf_counter()
        seeds = [request.sampling.seed for request in requests]
        sequences = self._scheduler.add_group(
            [self._with_time_limit(request) for request in requests],
            seeds=[secrets.randbits(63) if seed is None else seed for seed in seeds],
            now=now,
            chain=chain,
        )
        for listener in self._listeners:
            listener.arrived(sequences, now)
        streams = [self._open(sequence, now) for sequence in sequences]
        self._counters.idle_meter.work_arrived(now)
        self._is_empty.clear()
        self._wake_up()
        return streams

    def begin_chain(self) -> RequestChain:
        """Begin a chain, which drain() waits for. Raises Draining."""
        self._check_open()
        chain = RequestChain()
        self._chains.add(chain)
        self._is_empty.clear()
        return chain

    def end_chain(self, chain: RequestChain) -> None:
        """End a chain: no more of its requests will come."""
        self._chains.discard(chain)
        self._note_empty()

    def _check_open(self, chain: RequestChain | None = None) -> None:
        if self.is_draining and chain not in self._chains:
            raise Draining("The server is shutting down and takes no new requests.")

    def _with_time_limit(self, request: Request) -> Request:
        if request.queue_timeout_seconds is None and self._queue_timeout_seconds is not None:
            return replace(request, queue_timeout_seconds=self._queue_timeout_seconds)
        return request

    def _open(self, sequence: Sequence, now: float) -> RequestStream:
        """Return the stream of a sequence that was queued."""
        mailbox = Mailbox()
        stream = RequestStream(
            sequence.request.request_id,
            sequence.num_prompt_tokens,
            mailbox,
            abort=lambda: self._abort(sequence.id),
            on_collect=lambda: self.delivery.collect(sequence),
        )
        self._active[sequence.id] = ActiveRequest(sequence, stream, mailbox, now)
        self.delivery.open(sequence)
        self._counters.num_prompt_tokens += sequence.num_prompt_tokens
        return stream

    def _abort(self, sequence_id: int) -> None:
        if sequence_id in self._active:
            self._scheduler.mark(sequence_id, FinishReason.ABORT)
            self._wake_up()

    # Output

    def add_output(self, plan: StepPlan, output: StepOutput, progress: abc.Sequence[Progress]) -> None:
        """Take the readouts of a step, and the tokens that sequences gained by it; `progress` is commit()'s.

        Sequences without a next token end with an error.
        """
        for index, results in output.readouts.items():
            if (active := self._active.get(plan.sequence_ids[index])) is not None:
                for part, result in zip(plan.readouts[index], results, strict=True):
                    if isinstance(part.readout, PromptLogprobs):
                        self.delivery.add_prompt_tokens(active.sequence.id, part.next_token_ids, result)
                    elif part.is_last:
                        active.stream.add_readout(part.readout, result)
        for sequence in [
            sequence for sequence, _ in progress if sequence.finish_reason is FinishReason.ERROR
        ]:
            self._counters.num_corrupted += not sequence.request.constraints
            self.fail(sequence, _no_token(sequence, output.problems.get(sequence.id)))
        self.delivery.add(progress, time.perf_counter(), logprobs_by_sequence(plan, output))

    def _deliver(self, decoded: Decoded, now: float) -> None:
        """Count new text of a request and put it into its mailbox."""
        active = self._active.get(decoded.sequence_id)
        if active is None:
            return
        delta, stream = decoded.delta, active.stream
        self._counters.num_generation_tokens += decoded.num_output_tokens - stream.num_output_tokens
        stream.num_output_tokens = decoded.num_output_tokens
        stream.num_cached_tokens = active.sequence.num_cached_tokens
        stream.num_reasoning_tokens = decoded.num_reasoning_tokens
        if active.first_token is None and delta.num_tokens:
            active.first_token = now
            stream.ttft_seconds = now - active.arrival
            self._observer.first_token(stream.ttft_seconds)
        elif active.last_token is not None and delta.num_tokens:
            self._observer.inter_token(now - active.last_token, delta.num_tokens)
        active.last_token = now
        if active.first_token is not None:
            stream.decode_seconds = now - active.first_token
        active.mailbox.put(delta)
        if delta.finish_reason is not None:
            if isinstance(delta.stop_reason, str):
                self._scheduler.mark(
                    decoded.sequence_id,
                    delta.finish_reason,
                    stop_reason=delta.stop_reason,
                    num_output_tokens=decoded.num_output_tokens,
                )
                self._wake_up()
            self._end(decoded.sequence_id, delta.finish_reason, None)

    def _on_undecodable(self, sequence_ids: set[int]) -> None:
        for sequence_id in sequence_ids:
            self._scheduler.mark(sequence_id, FinishReason.ERROR)
            self._end(sequence_id, FinishReason.ERROR, StepFailed("Decoding this request's text failed."))
        self._wake_up()

    # Ending

    def reap(self) -> None:
        """Apply aborts, stop strings and time limits."""
        for sequence in self._scheduler.reap():
            if sequence.finish_reason is FinishReason.ABORT:
                self._end(sequence.id, FinishReason.ABORT, None)
        for sequence, is_for_start in self._scheduler.expire(time.perf_counter()):
            self.fail(
                sequence,
                QueueTimeout("The request has waited longer than this server allows: it is overloaded.")
                if is_for_start
                else RequestTimeout("The answer took longer than the request allows."),
            )

    def fail(self, sequence: Sequence, error: EngineError) -> None:
        """End the request of a sequence that has ended in the scheduler with an error."""
        self._end(sequence.id, FinishReason.ERROR, error)

    def fail_all(self, error: EngineError) -> None:
        """End all requests and chains with an error."""
        self._chains.clear()
        self._scheduler.end_all(FinishReason.ERROR)
        for sequence_id in list(self._active):
            self._end(sequence_id, FinishReason.ERROR, error)

    async def drain(self, timeout_seconds: float | None) -> None:
        """Refuse new requests and wait for the running ones; after the time-out they end with Draining."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._is_empty.wait(), timeout_seconds)
        except TimeoutError:
            self.close()

    def close(self) -> None:
        """Refuse new requests and end the running ones with Draining."""
        self.is_draining = True
        self.fail_all(Draining("The server is shutting down."))

    def _end(self, sequence_id: int, reason: FinishReason, error: EngineError | None) -> None:
        """End a request, whatever the reason: close its stream and its text, and notify listeners."""
        active = self._active.pop(sequence_id, None)
        if active is None:
            return
        for listener in self._listeners:
            listener.ended(sequence_id, reason, time.perf_counter())
        self.delivery.close(sequence_id, has_ended=active.mailbox.is_closed)
        if not active.mailbox.is_closed:
            active.mailbox.fail(error or EngineError("The request was aborted."))
            self._wake_up()
        times = active.times(reason)
        active.stream.end(times)
        self._observer.request_finished(times)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._active and not self._chains:
            self._is_empty.set()


def _no_token(sequence: Sequence, problem: str | None) -> EngineError:
    """Return the error of a sequence without a next token; `problem` as in StepOutput.problems."""
    if not sequence.request.constraints:
        return StepFailed("The model computed no finite probabilities for this request.")
    if problem == "":
        return StepFailed("Computing this request failed.")
    grammar = sequence.request.sampling.grammar
    if grammar is not None and problem:
        return InvalidRequest(f"{grammar.label} cannot be followed any further: {problem}", grammar.param)
    message = "No token that the model can produce satisfies all that the request asks of its output."
    return InvalidRequest(message, None if grammar is None else grammar.param)
