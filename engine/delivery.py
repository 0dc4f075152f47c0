"""Sends the tokens of steps to the detokenizer thread, and hands out the text it returns."""

import asyncio
import logging
import time
from collections import abc, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.outputs import FinishReason, PromptLogprobColumns, TokenLogprobs
from engine.pacer import FLUSH_SECONDS, Pacer
from engine.readouts import PromptLogprobs
from engine.schedule.rows import Progress
from engine.schedule.sequence import Sequence
from engine.text.detokenizer import (
    NUM_CONTEXT_TOKENS,
    AddPromptTokens,
    AddTokens,
    BatchDecoder,
    CloseStream,
    Decoded,
    Detokenizer,
    Job,
    OpenStream,
)
from engine.text.token_bytes import TokenPieces

logger = logging.getLogger("monoloop.engine")

# Deliveries in one iteration of the event loop: about a millisecond of handlers. While a flood of requests is
# let in one per iteration, this is also how many deliveries each of them gets, whatever its length: with
# fewer there are larger chunks, and more requests per second.
MAX_DELIVERIES_AT_ONCE = 16


class Delivery:
    """Holds tokens until their stream may deliver, has them decoded, and hands out the text in slices.

    `on_text` is called for each piece of text, with the time; `on_fault` with the ids of the sequences whose
    text could not be decoded.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        pieces: TokenPieces,
        max_per_second: int,
        on_text: Callable[[Decoded, float], None],
        on_fault: Callable[[set[int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._detokenizer = Detokenizer(decoder, pieces)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="detokenizer")
        self._pacer = Pacer(max_per_second)
        self._on_text = on_text
        self._on_fault = on_fault
        self._jobs: list[Job] = []
        self._num_sent = self._num_decoded = 0  # lists of jobs
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # of tokens that the pacer holds back
        self._decoded: deque[Decoded] = deque()
        self._flush_timer: asyncio.TimerHandle | None = None

    def open(self, sequence: Sequence) -> None:
        """Begin the text of a sequence."""
        request, sampling = sequence.request, sequence.request.sampling
        has_prompt_logprobs = request.readout(PromptLogprobs) is not None
        self._pacer.open(sequence.id)
        self._jobs.append(
            OpenStream(
                sequence_id=sequence.id,
                context_token_ids=request.prompt_token_ids[-NUM_CONTEXT_TOKENS:],
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                skip_special_tokens=sampling.skip_special_tokens,
                return_tokens=request.return_tokens or sampling.logprobs is not None or has_prompt_logprobs,
                marks=sampling.marks,
                reasoning=sampling.reasoning,
                healed_token_ids=sampling.healed_token_ids,
            )
        )
        if has_prompt_logprobs:  # no logits precede the first token
            self._jobs.append(AddPromptTokens(sequence.id, request.prompt_token_ids[:1], None))

    def add_prompt_tokens(
        self, sequence_id: int, token_ids: tuple[int, ...], scores: PromptLogprobColumns | None
    ) -> None:
        """Add the next tokens of a prompt, with their logprobs, to the first delta of an open sequence."""
        self._jobs.append(AddPromptTokens(sequence_id, token_ids, scores))

    def collect(self, sequence: Sequence) -> None:
        """Decode a text less often, since it is read only at its end, unless a text is searched for in it."""
        sampling = sequence.request.sampling
        if not sampling.stop and sampling.reasoning is None:
            self._pacer.collect(sequence.id)

    def add(
        self,
        progress: abc.Sequence[Progress],
        now: float,
        logprobs: abc.Mapping[int, tuple[TokenLogprobs, ...]],
    ) -> None:
        """Have the new tokens of open sequences decoded, with the next send() or when the pacer allows.

        `logprobs` of the tokens, by sequence id, have an entry for each sampled token, taken or not.
        """
        if logprobs:
            for sequence, token_ids in progress:
                if sequence.id in logprobs and self._pacer.is_open(sequence.id):
                    entries = logprobs[sequence.id][: len(token_ids)]
                    self._logprobs.setdefault(sequence.id, []).extend(entries)
        for sequence, token_ids in self._pacer.add(progress, now):
            entries = self._take_logprobs(sequence.id)
            if sequence.finish_reason is None:
                self._jobs.append(AddTokens(sequence.id, token_ids, logprobs=entries))
                continue
            is_stop_token = sequence.finish_reason is FinishReason.STOP and sequence.ends_with_final_token
            show = sequence.stop_reason is not None and sequence.request.sampling.include_stop_str_in_output
            hide_last = is_stop_token and not show
            self._jobs.append(
                AddTokens(
                    sequence.id,
                    token_ids,
                    sequence.finish_reason,
                    sequence.stop_reason,
                    hide_last,
                    entries,
                )
            )
        if self._pacer.is_holding and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    def _take_logprobs(self, sequence_id: int) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of released tokens: the pacer holds all of a stream's tokens, or none."""
        return tuple(self._logprobs.pop(sequence_id, ())) if self._logprobs else ()

    def close(self, sequence_id: int, *, has_ended: bool) -> None:
        """Forget a sequence, and its text unless that `has_ended`."""
        self._pacer.close(sequence_id)
        self._logprobs.pop(sequence_id, None)
        if not has_ended:
            self._jobs.append(CloseStream(sequence_id))

    def send(self) -> None:
        """Send the tokens of one step to the detokenizer, as one job for all streams."""
        if self._jobs:
            jobs, self._jobs = self._jobs, []
            self._num_sent += 1
            self._thread.submit(self._decode, jobs)

    def _decode(self, jobs: list[Job]) -> None:
        """Process jobs on the thread."""
        results: list[Decoded] | BaseException
        try:
            results = self._detokenizer.process(jobs)
        except BaseException as error:  # a panic in Rust is not an Exception
            results = error
        self._loop.call_soon_threadsafe(self._take, jobs, results)

    def progress(self) -> object:
        """Return the number of jobs done, or None if none is left."""
        return self._num_decoded if self._num_decoded < self._num_sent else None

    def stop(self) -> None:
        """End the thread after its current job."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._thread.shutdown(wait=False)

    def _flush(self) -> None:
        """Send tokens that no step has sent in time."""
        self._jobs += [
            AddTokens(sequence_id, token_ids, logprobs=self._take_logprobs(sequence_id))
            for sequence_id, token_ids in self._pacer.due(time.perf_counter())
        ]
        self.send()
        self._flush_timer = (
            self._loop.call_later(FLUSH_SECONDS, self._flush) if self._pacer.is_holding else None
        )

    def _take(self, jobs: list[Job], results: list[Decoded] | BaseException) -> None:
        self._num_decoded += 1
        sequence_ids = {job.sequence_id for job in jobs}
        if isinstance(results, BaseException):
            logger.error("detokenizing failed; the step's requests end with an error", exc_info=results)
            self._on_fault(sequence_ids)
            return
        is_handing_out = bool(self._decoded)
        self._decoded += results
        for sequence_id in sequence_ids.difference(decoded.sequence_id for decoded in results):
            self._pacer.delivered(sequence_id)
        if not is_handing_out:
            self._hand_out()

    def _hand_out(self) -> None:
        """Hand out a slice of the decoded text: each piece wakes a handler, and other work must run, too."""
        now = time.perf_counter()
        for _ in range(min(MAX_DELIVERIES_AT_ONCE, len(self._decoded))):
            decoded = self._decoded.popleft()
            self._pacer.delivered(decoded.sequence_id)
            try:
                self._on_text(decoded, now)
            except Exception as error:
                logger.error("delivering text failed; its request ends with an error", exc_info=error)
                self._on_fault({decoded.sequence_id})
        if self._decoded:
            self._loop.call_soon(self._hand_out)
