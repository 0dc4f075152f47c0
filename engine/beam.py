"""Beam search for the most likely whole outputs, on top of the engine's public submit_group().

Every step asks the engine for one token of each of the `width` beams, with the most likely alternatives; the
prefix cache holds their common beginnings. Beams are kept, finished and returned as in transformers'
`generate(num_beams=width, do_sample=False)`, by the raw log-probabilities of the tokens.
"""

import asyncio
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineError, InvalidRequest
from engine.mailbox import Mailbox
from engine.outputs import FinishReason, TextDelta, TokenLogprobs, TokenPiece
from engine.readouts import MAX_LOGPROBS
from engine.request import BeamParams, Request, SamplingParams
from engine.stream import RequestStream
from engine.text.detokenizer import NUM_CONTEXT_TOKENS, AddTokens, Detokenizer, OpenStream

if TYPE_CHECKING:
    from engine.engine import Engine


class _Token(NamedTuple):
    """Linked list of an output's tokens, newest first; beams share their prefix."""

    before: "_Token | None"
    token_id: int
    logprobs: TokenLogprobs


class Beam(NamedTuple):
    """An output so far: its tokens, the sum of their log-probabilities, and the ids of prompt and output."""

    last: _Token | None
    num_tokens: int
    logprob: float
    token_ids: tuple[int, ...] = ()

    def score(self, length_penalty: float, num_tokens: int | None = None) -> float:
        """Return the log-probability divided by a power of the length, its own or `num_tokens`."""
        return self.logprob / float((num_tokens or self.num_tokens) ** length_penalty)

    def tokens(self) -> list[_Token]:
        """Return the tokens of the output, in order."""
        tokens: list[_Token] = []
        token = self.last
        while token is not None:
            tokens.append(token)
            token = token.before
        return tokens[::-1]


class _Candidate(NamedTuple):
    """A beam continued by the token of rank `rank` among the most likely ones, and its log-probability."""

    logprob: float
    beam: Beam
    top: tuple[tuple[TokenPiece, float], ...]
    rank: int

    @property
    def token_id(self) -> int:
        return self.top[self.rank][0].token_id


def search_beams(engine: "Engine", request: Request, beams: BeamParams, n: int) -> list[RequestStream]:
    """Search in the background; return the streams of the `n` best outputs, best first.

    Each stream gets its whole output as one delta, or the error of a step; aborting one ends the search and
    all streams. Only the sampling parameters about the end of an output and its logprobs count; no token is
    drawn, restricted or penalised. The first step is queued like any request, later ones in its place. Raises
    what submit() raises.
    """
    search = _Search(engine, request, beams, n)
    search.begin()
    task = asyncio.create_task(search.run(), name=f"beam search {request.request_id}")
    task.add_done_callback(search.end)
    return search.streams(task)


class _Search:
    """One search: the beams that grow, and the outputs that have ended."""

    def __init__(self, engine: "Engine", request: Request, beams: BeamParams, n: int) -> None:
        sampling = request.sampling
        self._ends = sampling.stop_token_ids
        if not sampling.ignore_eos:
            self._ends |= frozenset(engine.model.eos_token_ids)
        # Enough to contain the best `width` that do not end, and all that end among the best `width`.
        self._num_candidates = beams.width + len(self._ends)
        if self._num_candidates > MAX_LOGPROBS:
            most = MAX_LOGPROBS - len(self._ends)
            raise InvalidRequest(
                f"A search with {len(self._ends)} tokens that end an output has at most {most} beams.", "n"
            )
        if not 1 <= n <= beams.width:
            raise InvalidRequest(f"A search with {beams.width} beams has 1 to {beams.width} outputs.", "n")
        if sampling.max_tokens < 1:
            raise InvalidRequest("'max_tokens' must be at least 1 for beam search.", "max_tokens")
        self._engine = engine
        self._request = request
        self._params = beams
        self._growing = [Beam(None, 0, 0.0, request.prompt_token_ids)]
        self._ended: list[Beam] = []
        self._steps: list[RequestStream] = []
        self._streams: list[RequestStream] = []
        self._mailboxes = [Mailbox() for _ in range(n)]
        self._chain = engine.begin_chain()

    def begin(self) -> None:
        """Submit the first step."""
        try:
            self._submit()
        except BaseException:
            self._engine.end_chain(self._chain)
            raise

    def streams(self, task: "asyncio.Task[None]") -> list[RequestStream]:
        """Return the streams of the outputs that `task` will find."""

        def abort() -> None:
            if task.cancel():
                self._abort_steps()

        request = self._request
        self._streams = [
            RequestStream(
                request.request_id,
                len(request.prompt_token_ids),
                mailbox,
                abort=abort,
                on_collect=lambda: None,
            )
            for mailbox in self._mailboxes
        ]
        return self._streams

    async def run(self) -> None:
        """Search to the end and deliver the outputs."""
        num_cached_tokens = None
        while True:
            candidates = await self._candidates()
            if num_cached_tokens is None:
                num_cached_tokens = self._steps[0].num_cached_tokens
            self._keep(candidates)
            if self._is_over():
                break
            self._submit()
        deltas = await asyncio.to_thread(self._texts)
        for stream, mailbox, delta in zip(self._streams, self._mailboxes, deltas, strict=False):
            stream.num_cached_tokens = num_cached_tokens
            stream.num_output_tokens = delta.num_tokens
            mailbox.put(delta)

    def end(self, task: "asyncio.Task[None]") -> None:
        """Abort remaining steps and fail the streams that have no output."""
        self._abort_steps()
        self._engine.end_chain(self._chain)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            error = EngineError(
                "The request was aborted." if task.cancelled() else "There are fewer outputs."
            )
        for mailbox in self._mailboxes:
            if not mailbox.is_closed:
                mailbox.fail(error)

    def _abort_steps(self) -> None:
        for step in self._steps:
            step.abort()

    def _submit(self) -> None:
        """Ask for the next token of all growing beams."""
        request = self._request
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=self._num_candidates
        )
        self._steps = []
        for number, beam in enumerate(self._growing):
            step = replace(
                request,
                request_id=f"{request.request_id}-{beam.num_tokens}-{number}",
                prompt_token_ids=beam.token_ids,
                sampling=sampling,
            )
            self._steps += self._engine.submit_group([step], self._chain)

    async def _candidates(self) -> list[_Candidate]:
        """Return the continuations of all growing beams by their most likely next tokens, best first.

        Tokens that end an output are left out before `min_tokens`.
        """
        candidates = []
        for beam, step in zip(self._growing, self._steps, strict=True):
            [token] = (await step.collect()).tokens
            may_end = beam.num_tokens >= self._request.sampling.min_tokens
            candidates += [
                _Candidate(beam.logprob + logprob, beam, token.top, rank)
                for rank, (piece, logprob) in enumerate(token.top)
                if may_end or piece.token_id not in self._ends
            ]
        return sorted(candidates, key=itemgetter(0), reverse=True)

    def _keep(self, candidates: list[_Candidate]) -> None:
        """Finish those of the best `width` that end; keep the best `width` that do not."""
        width, penalty = self._params.width, self._params.length_penalty
        num_tokens = self._growing[0].num_tokens + 1
        growing: list[Beam] = []
        for place, candidate in enumerate(candidates):
            if len(growing) == width:
                break
            if num_tokens < self._request.sampling.max_tokens and candidate.token_id not in self._ends:
                growing.append(self._grown(candidate, (*candidate.beam.token_ids, candidate.token_id)))
            elif place < width:
                self._ended.append(self._grown(candidate))
        self._growing = growing
        self._ended.sort(key=lambda beam: beam.score(penalty), reverse=True)
        del self._ended[width:]

    def _grown(self, candidate: _Candidate, token_ids: tuple[int, ...] = ()) -> Beam:
        """Return a candidate as a beam; with `token_ids` if it keeps growing."""
        num_top = self._request.sampling.logprobs or 0
        top = tuple((piece.token_id, logprob) for piece, logprob in candidate.top[:num_top])
        logprobs = TokenLogprobs(candidate.top[candidate.rank][1], top)
        last = _Token(candidate.beam.last, candidate.token_id, logprobs)
        return Beam(last, candidate.beam.num_tokens + 1, candidate.logprob, token_ids)

    def _is_over(self) -> bool:
        """Return True if no beam grows, or none that can become one of the outputs."""
        if not self._growing:
            return True
        early, penalty = self._params.early_stopping, self._params.length_penalty
        if len(self._ended) < self._params.width:
            return False
        if early is True:
            return True
        # The best score a growing beam can reach if all later tokens were certain: at full length, if length
        # pays.
        is_patient = early == "never" and penalty > 0
        num_tokens = self._request.sampling.max_tokens if is_patient else None
        return self._growing[0].score(penalty, num_tokens) <= self._ended[-1].score(penalty)

    def _texts(self) -> list[TextDelta]:
        """Return the best outputs as deltas, made by the detokenizer as for any request."""
        request, sampling = self._request, self._request.sampling
        tokenizer = self._engine.tokenizer
        detokenizer = Detokenizer(tokenizer.decoder, tokenizer.pieces)
        deltas = []
        for number, beam in enumerate(self._ended[: len(self._mailboxes)]):
            output = beam.tokens()
            last = output[-1].token_id
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
                return_tokens=request.return_tokens or sampling.logprobs is not None,
            )
            tokens = AddTokens(
                number,
                tuple(token.token_id for token in output),
                FinishReason.STOP if has_stopped else FinishReason.LENGTH,
                stop_reason,
                hide_last=has_stopped and not is_shown,
                logprobs=tuple(token.logprobs for token in output) if sampling.logprobs is not None else (),
            )
            [decoded] = detokenizer.process([open_stream, tokens])
            deltas.append(decoded.delta)
        return deltas
