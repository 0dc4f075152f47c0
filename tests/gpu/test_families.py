"""Every family in bf16, its steps captured as CUDA graphs, against transformers in float32.

The bound is the error of transformers itself in bf16, on the same GPU and for the same tokens.
"""

from collections import defaultdict

import pytest
import torch

from engine.device.decode_graphs import DecodeGraphs
from engine.device.mixed_graphs import MixedGraphs
from engine.request import SamplingParams
from models.loader import load
from tests.gpu.driver import Driver, relative_error
from tests.models.families import FAMILIES, make, prompt
from tests.models.harness import files_of

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True)
MAX_LEN = 128
NUM_DECODE_STEPS = 30
# Rounding is random: over the logits of 60 positions, two models with the same roundings are this close.
FACTOR, MARGIN = 1.5, 1e-3


@pytest.fixture
def captured(monkeypatch) -> list[bool]:
    """For each step launched, True if its layers ran as a graph."""
    found: list[bool] = []
    fits, graph_for = DecodeGraphs.fits, MixedGraphs.graph_for

    def noting_fits(self, plan):
        found.append(fits(self, plan))
        return found[-1]

    def noting_graph_for(self, num_tokens, num_logits):
        graph = graph_for(self, num_tokens, num_logits)
        found[-1] = graph is not None
        return graph

    monkeypatch.setattr(DecodeGraphs, "fits", noting_fits)
    monkeypatch.setattr(MixedGraphs, "graph_for", noting_graph_for)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_are_as_close_to_float32_as_transformers(name, device, captured, tmp_path):
    reference = make(name)
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        driver = Driver(load(files_of(tmp_path), torch.bfloat16, device), num_slots=2, max_len=MAX_LEN)
    texts = {0: prompt(70, seed=0), 1: prompt(33, seed=1)}
    logits = defaultdict(list)

    def note(slots, tokens):
        for slot, token, row in zip(slots, tokens, driver.logits(len(slots)), strict=True):
            texts[slot].append(token)
            logits[slot].append(row.cpu())

    note([0], [driver.start(0, texts[0], GREEDY)])
    # A chunk of the second prompt alone, then the rest of it beside a decode row.
    note([0, 1], driver.start_beside([0], 1, texts[1], GREEDY, seed=0, first_piece=16))
    for _ in range(NUM_DECODE_STEPS):
        note([0, 1], driver.decode([0, 1]))
    if device.type == "cuda":
        assert len(captured) == NUM_DECODE_STEPS + 3 and all(captured)

    def transformers(model):
        where = next(model.parameters()).device
        with torch.inference_mode():
            of_slots = [
                model(torch.tensor([texts[slot][:-1]], device=where)).logits[0, -len(logits[slot]) :]
                for slot in texts
            ]
        return torch.cat(of_slots).float().cpu()

    exact = transformers(reference)
    theirs = relative_error(transformers(reference.to(device, torch.bfloat16)), exact)
    ours = relative_error(torch.stack([*logits[0], *logits[1]]), exact)
    print(f"{name}: relative error {ours:.2e}, transformers {theirs:.2e}")
    assert theirs < 0.2, f"transformers itself is {theirs:.1e} off: nothing is shown"
    assert ours < FACTOR * theirs + MARGIN, f"relative error {ours:.2e}, transformers {theirs:.2e}"
