"""Every family against transformers, on tiny random weights that transformers itself wrote.

Covers models/families/*.py.
"""

import asyncio
import copy
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.request import Request, SamplingParams
from models.decoder import Decoder
from models.families import registered_names
from models.loader import load
from tests.engine.tiny_engine import tiny_engine
from tests.models.families import FAMILIES, make, prompt
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

CHUNKS = {
    "at once": None,
    "token by token": [1] * 70,
    "in chunks": [16, 16, 38],
    "chunks and tokens": [17, 1, 1, 51],
    "the last one alone": [69, 1],
}


class Tiny:
    """A family's model by transformers, and ours with the same weights."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.reference = make(name)
        self.reference.save_pretrained(folder)
        self.decoder = load(files_of(folder), torch.float32, CPU)
        self._tolerance = FAMILIES[name].tolerance

    def check(self, found: torch.Tensor, token_ids: list[int], first: int = 0) -> None:
        """Compare logits [num_tokens - first, vocab_size] of the positions from `first` on."""
        expected = transformers_logits(self.reference, token_ids)[first:]
        worst = ((found - expected).abs().max() / expected.abs().max()).item()
        assert worst < self._tolerance, f"logits differ by {worst:.1e} of the largest"

    def check_greedy(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Check that greedy search of transformers continues the prompt with the same tokens.

        It does if every token has the largest logit after those before it. Of two logits closer than the
        tolerance, rounding decides which is larger.
        """
        logits = transformers_logits(self.reference, token_ids[:-1])[num_prompt_tokens - 1 :]
        chosen = logits.gather(1, torch.tensor(token_ids[num_prompt_tokens:])[:, None])[:, 0]
        gap = (logits.amax(-1) - chosen).max().item()
        assert gap <= self._tolerance * logits.abs().max().item(), (
            f"a token is {gap:.1e} below the largest logit"
        )


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_every_architecture_has_a_tiny_model():
    made = {family.architecture for family in FAMILIES.values()}
    score_heads = {name for name in registered_names() if name.endswith("ForSequenceClassification")}
    language_models = registered_names() - score_heads
    assert not language_models - made, "add these to tests/models/families.py"


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_logits_of_all_positions(tiny, chunks):
    ids = prompt(70)
    tiny.check(forward_logits(tiny.decoder, ids, chunks), ids)


class Recorder:
    """Keeps every sequence's tokens and the logits they were chosen from, as an engine computes them."""

    def __init__(self, engine: Engine, decoder: Decoder, patch: pytest.MonkeyPatch) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, dict[int, torch.Tensor]] = {}  # by sequence and position
        self.num_mixed_steps = 0
        self._steps: deque[torch.Tensor] = deque()
        compute, commit = decoder.logits, engine._scheduler.commit

        def logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            computed = compute(hidden, out)
            self._steps.append(computed.clone())
            return computed

        def recording_commit(plan: Any, output: Any) -> Any:
            self._read(plan)
            progress = commit(plan, output)
            for sequence, _ in progress:
                self.tokens[sequence.id] = sequence.token_ids.tolist()
            return progress

        patch.setattr(decoder, "logits", logits)
        patch.setattr(engine._scheduler, "commit", recording_commit)

    def _read(self, plan: Any) -> None:
        self.num_mixed_steps += min(plan.query_lens) == 1 < max(plan.query_lens)
        rows = iter(self._steps.popleft() if any(plan.num_logits) else ())
        for sequence, start, length, count in zip(
            plan.sequence_ids, plan.starts, plan.query_lens, plan.num_logits, strict=True
        ):
            for position in range(start + length - count, start + length):
                self.logits.setdefault(sequence, {})[position] = next(rows)


def greedy(prompt_ids: list[int], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request("r", tuple(prompt_ids), sampling)


async def test_logits_and_greedy_text_of_the_engine(tiny, monkeypatch):
    """Prompts in chunks beside decode rows, in a pool too small for all of them; then a prefix hit."""
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 33, 50)]
    async with tiny_engine(
        model=tiny.decoder, has_eos=False, token_budget=24, max_num_seqs=6, kv_tokens=160, overcommit=1.0
    ) as engine:
        recorder = Recorder(engine, tiny.decoder, monkeypatch)
        await asyncio.gather(*(engine.submit(greedy(ids, 30)).collect() for ids in prompts))
        assert engine.stats().preemptions_total > 0
        assert recorder.num_mixed_steps > 0
        longest = max(recorder.tokens.values(), key=len)
        prompts.append([*longest, *prompt(5)])
        stream = engine.submit(greedy(prompts[-1], 10))
        await stream.collect()
        assert stream.num_cached_tokens >= 64
    assert len(recorder.tokens) == len(prompts)
    for sequence, token_ids in recorder.tokens.items():
        logits = recorder.logits[sequence]
        first = min(logits)
        assert sorted(logits) == list(range(first, len(token_ids) - 1)), "logits of a token are missing"
        assert token_ids[: first + 1] in prompts
        tiny.check(torch.stack([logits[position] for position in sorted(logits)]), token_ids[:-1], first)
        tiny.check_greedy(token_ids, first + 1)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_sixteen_bit_is_as_close_as_transformers(tiny, dtype, unit):
    """Both round at the same places; neither may be much further from float32 than the other.

    The median of the tokens is compared, since a rounding that changes a token's experts changes it a lot.
    """
    ids = prompt(70)
    exact = transformers_logits(tiny.reference, ids)
    rounded = copy.deepcopy(tiny.reference).to(dtype)
    found = transformers_logits(rounded, ids), forward_logits(load(files_of(tiny.folder), dtype, CPU), ids)
    theirs, ours = ((logits - exact).abs().mean(-1).median().item() for logits in found)
    assert ours < 1.3 * theirs + unit * 0.01, f"error {ours:.2e}, transformers {theirs:.2e}"
