"""Beam search: the most likely whole outputs, found over the engine's public submit().

Every step asks the engine for one token of each of the `width` beams, with the most likely ones in its place;
the prefix cache holds what they have in common. What is kept, finished and returned is what transformers'
`generate(num_beams=width, do_sample=False)` keeps, by the raw log-probabilities of the tokens.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineError, InvalidRequest
from engine.outputs import FinishReason, TextDelta, TokenLogprobs
from engine.request import MAX_LOGPROBS, BeamParams, Request, SamplingParams
from engine.stream import RequestStream
from engine.text.detokenizer import AddTokens, Detokenizer, OpenStream
from engine.text.mailbox import Mailbox

if TYPE_CHECKING:
    from engine.engine import Engine

# Tokens of the prompt that are decoded in front of an output: they decide on its first space.
NUM_CONTEXT_TOKENS = 6


class Beam(NamedTuple):
    """An output so far: its tokens, what was told of each, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...] = ()
    told: tuple[TokenLogprobs, ...] = ()
    logprob: float = 0.0

    def score(self, length_penalty: float, num_tokens: int | None = None) -> float:
        """The log-probability, for an output of its own length or of `num_tokens`."""
        return self.logprob / float((num_tokens or len(self.token_ids)) ** length_penalty)


def search_beams(engine: "Engine", request: Request, beams: BeamParams, n: int) -> list[RequestStream]:
    """Search in the background; returns the streams of the `n` best outputs, best first.

    Each gets its whole output as one delta, or what a step raised; aborting one ends the search.
    Of the sampling parameters those count that say where an output ends and what is told of it; no token is
    drawn, restricted or penalised. Raises InvalidRequest.
    """
    search = _Search(engine, request, beams, n)
    task = asyncio.create_task(search.run(), name=f"beam search {request.request_id}")
    return [search.stream(mailbox, task) for mailbox in search.mailboxes]


class _Search:
    """One search: the beams that grow, and the outputs that have ended."""

    def __init__(self, engine: "Engine", request: Request, beams: BeamParams, n: int) -> None:
        sampling = request.sampling
        self._ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            self._ends |= frozenset(engine.model.eos_token_ids)
        # So many hold the best `width` that do not end, and whatever end is among the best `width` of all.
        self._num_candidates = beams.width + len(self._ends)
        if self._num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS - len(self._ends)
            raise InvalidRequest(
                f"A search with {len(self._ends)} tokens that end an output has at most {most} beams.", "n"
            )
        if sampling.max_tokens < 1:
            raise InvalidRequest("'max_tokens' must be at least 1 for beam search.", "max_tokens")
        self._engine = engine
        self._request = request
        self._params = beams
        self._growing = [Beam()]
        self._ended: list[Beam] = []
        self._streams: list[RequestStream] = []
        self._num_cached_tokens = 0
        self.mailboxes = [Mailbox() for _ in range(n)]

    def stream(self, mailbox: Mailbox, task: "asyncio.Task[None]") -> RequestStream:
        """The stream of an output that will come to `mailbox`."""

        def abort() -> None:
            if task.cancel():
                self._fail(EngineError("The request was aborted."))

        request = self._request
        stream = RequestStream(
            request.request_id, len(request.prompt_token_ids), mailbox, abort=abort, on_collect=lambda: None
        )
        self._streams.append(stream)
        return stream

    async def run(self) -> None:
        """Search to the end, and deliver."""
        try:
            while not self._is_over():
                self._keep(await self._step())
            deltas = await asyncio.to_thread(self._texts)
        except Exception as error:  # whatever it is, those who wait for an output must learn of it
            self._fail(error)
            return
        for stream, mailbox, delta in zip(self._streams, self.mailboxes, deltas, strict=True):
            stream.num_cached_tokens = self._num_cached_tokens
            stream.num_output_tokens = delta.num_tokens
            mailbox.put(delta)

    def _fail(self, error: Exception) -> None:
        """End every output with an error."""
        for mailbox in self.mailboxes:
            mailbox.fail(error)

    async def _step(self) -> list[Beam]:
        """The continuations of all growing beams by one token, best first."""
        request = self._request
        candidates: list[Beam] = []
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=self._num_candidates
        )
        streams: list[RequestStream] = []
        try:
            for number, beam in enumerate(self._growing):
                step = replace(
                    request,
                    request_id=f"{request.request_id}-{len(beam.token_ids)}-{number}",
                    prompt_token_ids=request.prompt_token_ids + beam.token_ids,
                    sampling=sampling,
                )
                streams.append(self._engine.submit(step))
            for beam, stream in zip(self._growing, streams, strict=True):
                [token] = (await stream.collect()).tokens
                candidates += self._continued(beam, [(p.token_id, value) for p, value in token.top])
        finally:
            for stream in streams:
                stream.abort()
        if not self._growing[0].token_ids:
            self._num_cached_tokens = streams[0].num_cached_tokens
        return sorted(candidates, key=lambda beam: beam.logprob, reverse=True)

    def _continued(self, beam: Beam, top: list[tuple[int, float]]) -> Iterable[Beam]:
        """A beam with each of its most likely next tokens; those that end it only where it may end."""
        may_end = len(beam.token_ids) >= self._request.sampling.min_tokens
        told = tuple(top[: self._request.sampling.logprobs or 0])
        for token_id, logprob in top:
            if may_end or token_id not in self._ends:
                yield Beam(
                    (*beam.token_ids, token_id),
                    (*beam.told, TokenLogprobs(logprob, told)),
                    beam.logprob + logprob,
                )

    def _keep(self, candidates: list[Beam]) -> None:
        """Of the best `width` those that end are outputs; the best `width` that do not end grow on."""
        width, penalty = self._params.width, self._params.length_penalty
        self._ended += [beam for beam in candidates[:width] if self._has_ended(beam)]
        self._ended.sort(key=lambda beam: beam.score(penalty), reverse=True)
        del self._ended[width:]
        self._growing = [beam for beam in candidates if not self._has_ended(beam)][:width]

    def _has_ended(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._ends or len(beam.token_ids) == self._request.sampling.max_tokens

    def _is_over(self) -> bool:
        """Whether nothing can grow, or nothing that is worth it."""
        if not self._growing:
            return True
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if len(self._ended) < self._params.width:
            return False
        if early is True:
            return True
        # How good the best beam can become, if all tokens to come were certain; where length pays, at most.
        is_patient = early == "never" and penalty > 0
        num_tokens = self._request.sampling.max_tokens if is_patient else None
        return self._growing[0].score(penalty, num_tokens) <= self._ended[-1].score(penalty)

    def _texts(self) -> list[TextDelta]:
        """The best outputs as deltas, by the way that all tokens take to become text."""
        request, sampling = self._request, self._request.sampling
        tokenizer = self._engine.tokenizer
        detokenizer = Detokenizer(tokenizer.decoder, tokenizer.pieces)
        deltas = []
        for number, beam in enumerate(self._ended[: len(self.mailboxes)]):
            last = beam.token_ids[-1]
            stop_reason = last if last in sampling.stop_token_ids else None
            is_shown = stop_reason is not None and sampling.include_stop_str_in_output
            has_stopped = last in self._ends
            open_stream = OpenStream(
                number,
                request.prompt_token_ids[-NUM_CONTEXT_TOKENS:],
                stop=(),
                include_stop=False,
                min_tokens=0,
                skip_special_tokens=sampling.skip_special_tokens,
                tell_tokens=request.tell_tokens or sampling.logprobs is not None,
            )
            tokens = AddTokens(
                number,
                beam.token_ids,
                FinishReason.STOP if has_stopped else FinishReason.LENGTH,
                stop_reason,
                hide_last=has_stopped and not is_shown,
                logprobs=beam.told if sampling.logprobs is not None else (),
            )
            [decoded] = detokenizer.process([open_stream, tokens])
            deltas.append(decoded.delta)
        return deltas
