"""A deterministic toy model: the next token is a hash of every token before it, read through the pages.

Whatever goes wrong on the way (a wrong page, a stale one, a lost or doubled token, a wrong position)
changes the text from there on.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.outputs import NO_PAGE, Row, StepOutput, StepPlan, TokenLogprobs, TokenScores

VOCAB_SIZE = 97
EOS = 96
HIDDEN_SIZE = 2


def next_token(token_ids: list[int], seed: int = 0) -> int:
    """The toy model: CRC-32 of the whole prefix; eos about once in a hundred tokens."""
    data = np.asarray([seed, *token_ids], np.int64).tobytes()
    return zlib.crc32(data) % VOCAB_SIZE


def toy_logprobs(token: int, num_top: int, rank: int | None = None) -> TokenLogprobs:
    """What the toy model says about a token it chose: the next ones are ever less likely."""
    top = [((token + i) % VOCAB_SIZE, -(token % 8) / 8 - i) for i in range(num_top)]
    return TokenLogprobs(-(token % 8) / 8, tuple(top), rank)


def reference(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False, seed: int = 0) -> list[int]:
    """Output of a request that runs alone, one token at a time."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, seed))
        if token_ids[-1] == EOS and not ignore_eos:
            break
    return token_ids[len(prompt) :]


@dataclass
class ToyStep:
    """A launched step; its tokens are computed when it is launched, as on a stream."""

    output: StepOutput
    is_done: bool = True

    def wait(self) -> StepOutput:
        return self.output


class ToyRunner:
    """Keeps token ids where a model keeps keys and values, behind the same slots and page tables."""

    is_asynchronous = False

    def __init__(
        self, num_pages: int, page_size: int, before_step: Callable[[StepPlan], None] | None = None
    ) -> None:
        self.cache = np.full((num_pages, page_size), -1, np.int64)
        self.page_size = page_size
        self.tables: dict[int, list[int]] = {}
        self.newest: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.num_logprobs: dict[int, int | None] = {}
        self.before_step = before_step
        self.num_launched = 0

    def launch(self, plan: StepPlan, on_wait: Callable[[], None] = lambda: None) -> ToyStep:
        start_seconds = time.perf_counter()
        self.num_launched += 1
        if self.before_step is not None:
            self.before_step(plan)
        decode, page_size = plan.decode, self.page_size
        assert plan.num_tokens == len(decode.slots) + sum(row.num_tokens for row in plan.chunks)
        singles = [row.num_tokens == 1 for row in plan.chunks]
        assert singles == sorted(singles, reverse=True), "single-token rows stand first"
        slots = [*decode.slots, *(row.slot for row in plan.chunks)]
        assert len(set(slots)) == len(slots), "two rows in one slot"
        for source, target in plan.page_copies:
            self.cache[target] = self.cache[source]
        for slot, start, page in zip(decode.slots, decode.starts, decode.new_pages, strict=True):
            if page != NO_PAGE:
                assert start == len(self.tables[slot]) * page_size, "a page that is not needed yet"
                self.tables[slot].append(page)
            self._write(slot, start, (self.newest[slot],))
        for row in plan.chunks:
            if row.init is not None:
                self.tables[row.slot] = []
                self.seeds[row.slot] = row.init.seed
                self.num_logprobs[row.slot] = row.init.sampling.logprobs
            self.tables[row.slot] += row.new_pages
            self._write(row.slot, row.start, row.token_ids)
        tokens = [(self._sample(*row),) for row in zip(decode.slots, decode.starts, strict=True)]
        for row in plan.chunks:
            last = row.start + row.num_tokens - 1
            tokens.append((self._sample(row.slot, last),) if row.sample else ())
        logprobs = None
        wanted = [self.num_logprobs[slot] for slot in slots]
        if any(num_top is not None for num_top in wanted):
            logprobs = [
                tuple(None if num_top is None else toy_logprobs(token, num_top) for token in row)
                for row, num_top in zip(tokens, wanted, strict=True)
            ]
        scores = None
        if any(row.scored is not None for row in plan.chunks):
            scores = [self._scores(row) for row in plan.chunks]
        pooled = {row.sequence_id: self._pooled(row) for row in plan.chunks if row.pool and row.pool.is_last}
        end_seconds = time.perf_counter()
        return ToyStep(
            StepOutput(plan.step_id, tokens, start_seconds, end_seconds, logprobs, scores, pooled=pooled)
        )

    def _scores(self, row: Row) -> TokenScores | None:
        """What the toy model says about the scored tokens of a chunk, which it must have computed."""
        if row.scored is None:
            return None
        start, token_ids, num_top = row.scored
        assert row.start <= start and start + len(token_ids) <= row.start + row.num_tokens
        within = row.start + row.num_tokens - start - 1
        assert token_ids[:within] == row.token_ids[start - row.start + 1 :][: len(token_ids)]
        told = [toy_logprobs(token_id, num_top, rank=1) for token_id in token_ids]
        top = np.array([logprobs.top for logprobs in told]).reshape(len(told), num_top, 2)
        return TokenScores(
            np.array([logprobs.logprob for logprobs in told]),
            top[..., 1],
            top[..., 0].astype(np.int64),
            np.array([logprobs.rank for logprobs in told]),
        )

    def spoil(self, plan: StepPlan) -> None:
        """Make it as if this newest step had failed: garbage in all places it wrote to."""
        for slot, start in zip(plan.decode.slots, plan.decode.starts, strict=True):
            self._write(slot, start, (-2,))
        for row in plan.chunks:
            self._write(row.slot, row.start, (-2,) * row.num_tokens)

    def _write(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        for position, token_id in enumerate(token_ids, start):
            page = self.tables[slot][position // self.page_size]
            self.cache[page, position % self.page_size] = token_id

    def _pooled(self, row: Row) -> np.ndarray:
        """The mean of the tokens before, or the last one, and how many there are."""
        prefix = self.cache[self.tables[row.slot]].reshape(-1)[: row.start + row.num_tokens]
        chosen = prefix if row.pool.pooling == "mean" else prefix[-1:]
        return np.array([chosen.mean(), len(prefix)], np.float32)

    def _sample(self, slot: int, position: int) -> int:
        """The token after the one at `position`."""
        prefix = self.cache[self.tables[slot]].reshape(-1)[: position + 1].tolist()
        self.newest[slot] = next_token(prefix, self.seeds[slot])
        return self.newest[slot]
