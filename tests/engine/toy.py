"""A deterministic toy model: the next token is a hash of every token before it, read through the pages.

Whatever goes wrong on the way (a wrong page, a stale one, a lost or doubled token, a wrong position)
changes the text from there on.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.outputs import NO_PAGE, PromptLogprobColumns, RowReadout, StepOutput, StepPlan, TokenLogprobs
from engine.readouts import PooledHidden, PromptLogprobs

VOCAB_SIZE = 97
EOS = 96
HIDDEN_SIZE = 2


def next_token(token_ids: list[int], seed: int = 0, windows: tuple[int, ...] = (0,)) -> int:
    """The toy model: CRC-32 of what its layers, one for each window, see; eos about once in 100 tokens."""
    seen = [token_id for window in windows for token_id in token_ids[-window:]]
    return zlib.crc32(np.asarray([seed, *seen], np.int64).tobytes()) % VOCAB_SIZE


def toy_logprobs(token: int, num_top: int, rank: int | None = None) -> TokenLogprobs:
    """What the toy model says about a token it chose: the next ones are ever less likely."""
    top = [((token + i) % VOCAB_SIZE, -(token % 8) / 8 - i) for i in range(num_top)]
    return TokenLogprobs(-(token % 8) / 8, tuple(top), rank)


def reference(
    prompt: list[int],
    max_tokens: int,
    *,
    ignore_eos: bool = False,
    seed: int = 0,
    windows: tuple[int, ...] = (0,),
) -> list[int]:
    """Output of a request that runs alone, one token at a time."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, seed, windows))
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


LONG_MARK = 1000


class ToyRunner:
    """Keeps token ids where a model keeps keys and values, behind the same slots and page tables."""

    is_asynchronous = False

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        before_step: Callable[[StepPlan], None] | None = None,
        windows: tuple[int, ...] = (0,),
        short_context: int | None = None,
    ) -> None:
        self.cache = np.full((num_pages, page_size), -1, np.int64)
        self.page_size = page_size
        self.windows = windows
        self.tables: dict[int, list[list[int]]] = {}  # by slot, of each KV group
        self.newest: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.num_logprobs: dict[int, int | None] = {}
        self.before_step = before_step
        self.num_launched = 0
        self.short_context = short_context
        self.marks: dict[int, int] = {}  # by slot: what its sequence adds to its token ids in the pages

    def launch(self, plan: StepPlan, on_wait: Callable[[], None] = lambda: None) -> ToyStep:
        start_seconds = time.perf_counter()
        self.num_launched += 1
        if self.before_step is not None:
            self.before_step(plan)
        lens = plan.query_lens
        kinds = [(index in plan.token_ids, length > 1) for index, length in enumerate(lens)]
        assert kinds == sorted(kinds), "rows without token ids first, then those of one token"
        assert len(set(plan.slots)) == plan.num_rows, "two rows in one slot"
        for source, target in plan.page_copies:
            self.cache[target] = self.cache[source]
        for index, (slot, start) in enumerate(zip(plan.slots, plan.starts, strict=True)):
            if (init := plan.inits.get(index)) is not None:
                self.tables[slot] = [[] for _ in self.windows]
                self.seeds[slot] = init.seed
                length = len(init.prompt_token_ids) + len(init.output_token_ids)
                is_long = self.short_context is not None and length > self.short_context
                self.marks[slot] = LONG_MARK if is_long else 0
                self.num_logprobs[slot] = init.sampling.logprobs
            elif index in plan.new_pages and index not in plan.token_ids:
                assert start == len(self.tables[slot][0]) * self.page_size, "a page that is not needed yet"
            for table, pages in zip(self.tables[slot], plan.new_pages.get(index, ()), strict=False):
                table += pages
            assert len(set(map(len, self.tables[slot]))) == 1, "groups with unequal columns"
            self._write(slot, start, plan.token_ids.get(index) or (self.newest[slot],))
        tokens = [self._sampled(plan, index) for index in range(plan.num_rows)]
        logprobs = None
        asked = [self.num_logprobs[slot] for slot in plan.slots]
        if any(num_top is not None for num_top in asked):
            logprobs = [
                tuple(None if num_top is None else toy_logprobs(token, num_top) for token in row)
                for row, num_top in zip(tokens, asked, strict=True)
            ]
        readouts = {
            index: tuple(self._readout(plan, index, part) for part in parts)
            for index, parts in plan.readouts.items()
        }
        end_seconds = time.perf_counter()
        return ToyStep(
            StepOutput(plan.step_id, tokens, start_seconds, end_seconds, logprobs, readouts=readouts)
        )

    def _sampled(self, plan: StepPlan, index: int) -> tuple[int, ...]:
        """The tokens of a row: up to the first that is not the draft in its place."""
        num_logits = plan.num_logits[index]
        drafts = plan.token_ids.get(index, ())[1 - num_logits :] if num_logits > 1 else ()
        last = plan.starts[index] + plan.query_lens[index] - 1
        tokens: list[int] = []
        for position, draft in zip(range(last - num_logits + 1, last + 1), [*drafts, None], strict=False):
            tokens.append(self._sample(plan.slots[index], position))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def _readout(self, plan: StepPlan, index: int, part: RowReadout) -> Any:
        row_start, row_end = plan.starts[index], plan.starts[index] + plan.query_lens[index]
        assert row_start <= part.start and part.start + part.num_tokens <= row_end
        within = row_end - part.start - 1
        known = plan.token_ids[index][part.start - row_start + 1 :]
        assert part.next_token_ids[:within] == known[: len(part.next_token_ids)]
        if isinstance(part.readout, PooledHidden):
            return self._pooled(plan.slots[index], row_end, part.readout) if part.is_last else None
        assert isinstance(part.readout, PromptLogprobs)
        return self._prompt_logprobs(part.next_token_ids, part.readout.num_top)

    def _prompt_logprobs(self, token_ids: tuple[int, ...], num_top: int) -> PromptLogprobColumns:
        found = [toy_logprobs(token_id, num_top, rank=1) for token_id in token_ids]
        top = np.array([logprobs.top for logprobs in found]).reshape(len(found), num_top, 2)
        return PromptLogprobColumns(
            np.array([logprobs.logprob for logprobs in found]),
            top[..., 1],
            top[..., 0].astype(np.int64),
            np.array([logprobs.rank for logprobs in found]),
        )

    def spoil(self, plan: StepPlan) -> None:
        """Make it as if this newest step had failed: garbage in all places it wrote to."""
        for slot, start, length in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            self._write(slot, start, (-2,) * length)

    def _write(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        for position, token_id in enumerate(token_ids, start):
            for table in self.tables[slot]:
                page = table[position // self.page_size]
                assert page != NO_PAGE
                self.cache[page, position % self.page_size] = token_id + self.marks[slot]

    def _seen(self, slot: int, group: int, end: int) -> list[int]:
        """What a query before position `end` sees in the pages of a group."""
        window = self.windows[group]
        start = max(0, end - window) if window else 0
        pages = self.tables[slot][group][start // self.page_size : -(-end // self.page_size)]
        assert NO_PAGE not in pages
        offset = start % self.page_size
        seen = self.cache[pages].reshape(-1)[offset : offset + end - start]
        return (seen - self.marks[slot]).tolist()

    def _pooled(self, slot: int, end: int, readout: PooledHidden) -> np.ndarray:
        """The mean of the tokens up to `end`, or the last one, and how many there are."""
        prefix = np.array(self._seen(slot, 0, end))
        chosen = prefix if readout.pooling == "mean" else prefix[-1:]
        return np.array([chosen.mean(), len(prefix)], np.float32)

    def _sample(self, slot: int, position: int) -> int:
        """The token after the one at `position`."""
        seen = [t for group in range(len(self.windows)) for t in self._seen(slot, group, position + 1)]
        self.newest[slot] = next_token(seen, self.seeds[slot])
        return self.newest[slot]
