"""Drives a ModelRunner row by row and keeps the logits it computes, in graphs as well."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from engine.outputs import Row, SlotInit, StepPlan
from engine.request import SamplingParams
from models.decoder import Decoder

PAGE_SIZE = 16


class Recording:
    """A decoder whose newest logits stay in `newest` [max_rows, vocab_size] fp32, captured or not."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        self._decoder = decoder
        self.newest = torch.zeros(max_rows, decoder.spec.vocab_size, device=decoder.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(self, *args: Any) -> torch.Tensor:
        return self._decoder(*args)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._decoder.logits(hidden, out)
        self.newest[: logits.shape[0]] = logits
        return logits


class Driver:
    """Sequences in slots of a runner; each owns its pages from the start."""

    def __init__(self, decoder: Decoder, num_slots: int, max_len: int) -> None:
        self._model: Any = Recording(decoder, num_slots)
        self._pages_each = -(-max_len // PAGE_SIZE)
        config = EngineConfig(
            device=decoder.device.type,
            page_size=PAGE_SIZE,
            kv_tokens=num_slots * self._pages_each * PAGE_SIZE,
            max_model_len=max_len,
            max_num_seqs=num_slots,
        )
        self.runner = ModelRunner.around(self._model, config, max_len, ())
        self._lengths: dict[int, int] = {}
        self._num_steps = 0

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingParams, seed: int = 0) -> int:
        """Compute a prompt; returns its first token."""
        return self.start_beside((), slot, prompt, sampling, seed)[0]

    def start_beside(
        self,
        decoding: Sequence[int],
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        seed: int,
        first_piece: int = 0,
    ) -> list[int]:
        """Compute a prompt, and one token more for each of the slots `decoding`, in one step.

        The first so many tokens of the prompt are computed in a step of their own before.
        """
        num_groups = len(self.runner.kv_windows)
        pages = (
            torch.arange(num_groups * self._pages_each).view(num_groups, -1)
            + slot * self._pages_each * num_groups
        )
        new_pages = tuple(map(tuple, pages.tolist()))
        init = SlotInit(sampling, seed=seed, prompt_token_ids=tuple(prompt), output_token_ids=())
        row = Row(slot, slot, 0, tuple(prompt), new_pages=new_pages, init=init)
        if first_piece:
            self._run([row._replace(token_ids=row.token_ids[:first_piece], num_logits=0)])
            row = Row(slot, slot, first_piece, row.token_ids[first_piece:])
        tokens = self._run([*self._decode_rows(decoding), row])
        self._lengths[slot] = len(prompt)
        return tokens

    def decode(self, slots: Sequence[int]) -> list[int]:
        """One token more for each of the slots, in one step."""
        return self._run(self._decode_rows(slots))

    def _decode_rows(self, slots: Sequence[int]) -> list[Row]:
        rows = [Row(slot, slot, self._lengths[slot]) for slot in slots]
        for slot in slots:
            self._lengths[slot] += 1
        return rows

    def logits(self, num_rows: int) -> torch.Tensor:
        """Those of the last step [num_rows, vocab_size] fp32, as the model gave them."""
        newest: torch.Tensor = self._model.newest
        return newest[:num_rows].clone()

    def _run(self, rows: Sequence[Row]) -> list[int]:
        self._num_steps += 1
        output = self.runner.launch(StepPlan.of(self._num_steps, rows)).wait()
        return [token for row in output.tokens for token in row]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """‖found - exact‖ / ‖exact‖; NaN where anything is not a number."""
    return ((found - exact).norm() / exact.norm()).item()
