"""A deterministic toy model: the next token is a hash of every token before it, read through the pages.

Whatever goes wrong on the way (a wrong page, a stale one, a lost or doubled token, a wrong position)
changes the text from there on.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.outputs import StepOutput, StepPlan

VOCAB_SIZE = 97
EOS = 96


def next_token(token_ids: list[int], seed: int = 0) -> int:
    """The toy model: CRC-32 of the whole prefix; eos about once in a hundred tokens."""
    data = np.asarray([seed, *token_ids], np.int64).tobytes()
    return zlib.crc32(data) % VOCAB_SIZE


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

    def __init__(
        self, num_pages: int, page_size: int, before_step: Callable[[StepPlan], None] | None = None
    ) -> None:
        self.cache = np.full((num_pages, page_size), -1, np.int64)
        self.page_size = page_size
        self.tables: dict[int, list[int]] = {}
        self.newest: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.before_step = before_step
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> ToyStep:
        start = time.perf_counter()
        self.num_launched += 1
        if self.before_step is not None:
            self.before_step(plan)
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows)
        singles = [row.num_tokens == 1 for row in plan.rows]
        assert singles == sorted(singles, reverse=True), "single-token rows stand first"
        assert plan.num_decode_rows == sum(singles)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "two rows in one slot"
        for row in plan.rows:
            if row.init is not None:
                self.tables[row.slot] = []
                self.seeds[row.slot] = row.init.seed
            self.tables[row.slot] += row.new_pages
            token_ids = row.token_ids if row.token_ids is not None else (self.newest[row.slot],)
            assert len(token_ids) == row.num_tokens
            for position, token_id in enumerate(token_ids, row.start):
                page = self.tables[row.slot][position // self.page_size]
                self.cache[page, position % self.page_size] = token_id
        tokens = []
        for row in plan.rows:
            if not row.sample:
                tokens.append(())
                continue
            length = row.start + row.num_tokens
            prefix = self.cache[self.tables[row.slot]].reshape(-1)[:length].tolist()
            token = next_token(prefix, self.seeds[row.slot])
            self.newest[row.slot] = token
            tokens.append((token,))
        return ToyStep(StepOutput(plan.step_id, tuple(tokens), start, time.perf_counter()))
