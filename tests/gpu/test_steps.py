"""Graphs and the eager path, a row alone and among others, seeded draws: what is equal to the last bit.

Attention, norms, rotation and sampling treat a row by itself. The matrix products come from a library that
may choose its kernels by the number of rows: steps of the same size are equal to the last bit, whoever else
is in them; between sizes rows may differ by rounding. On an H100 (torch 2.11) they did not: decode rows of
this shape were equal to the last bit alone, among 64, and in padded graphs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.device.decode_graphs import DecodeGraphs
from engine.device.mixed_graphs import MixedGraphs
from engine.request import SamplingParams
from kernels.sampling import sample
from models.loader import random_decoder
from models.shapes import SHAPES
from tests.gpu.driver import Driver, relative_error

# In one process, which makes the decoder and its graphs once.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("steps")]

SHAPE = "llama-1b"
NUM_SLOTS = 64
NUM_STEPS = 12
LONGEST_PROMPT = 700
MAX_LEN = LONGEST_PROMPT + NUM_STEPS + 2
# Logits of 16 bf16 layers that round differently are this far apart at most: each is 1.5e-2 from float32.
ROUNDING = 3e-2

DRAWN = SamplingParams(max_tokens=10**6, temperature=1.0, top_p=0.95, top_k=100, ignore_eos=True)
# What only the full sampler does.
TOLD = dataclasses.replace(DRAWN, logprobs=5, repetition_penalty=1.2)
# One and the same token, so that rows that round differently still continue the same text.
FORCED = dataclasses.replace(DRAWN, allowed_token_ids=frozenset([77]))


@pytest.fixture(scope="module")
def driver(device):
    """A runner of random weights with all its graphs."""
    with torch.inference_mode():
        decoder = random_decoder(SHAPES[SHAPE], torch.bfloat16, device)
    return Driver(decoder, NUM_SLOTS, MAX_LEN)


def prompt(index: int) -> list[int]:
    """Random ids; the length differs from row to row."""
    generator = torch.Generator().manual_seed(index)
    length = 1 + index * 7919 % LONGEST_PROMPT
    return torch.randint(0, SHAPES[SHAPE].vocab_size, (length,), generator=generator).tolist()


def run(
    driver: Driver,
    texts: dict[int, int],
    sampling: SamplingParams,
    between: Callable[[], None] = lambda: None,
) -> tuple[list[list[int]], torch.Tensor]:
    """Start text `texts[slot]` in each slot and, with `between` called before, decode them together.

    Returns their tokens and logits [NUM_STEPS, num_rows, vocab_size] of the decode steps.
    """
    tokens = [[driver.start(slot, prompt(text), sampling, seed=text)] for slot, text in texts.items()]
    between()
    logits = []
    for _ in range(NUM_STEPS):
        for row, token in zip(tokens, driver.decode(list(texts)), strict=True):
            row.append(token)
        logits.append(driver.logits(len(texts)))
    return tokens, torch.stack(logits)


def without_graphs(patch) -> None:
    """From here on steps with prompts are launched kernel by kernel."""
    patch.setattr(MixedGraphs, "graph_for", lambda self, num_tokens, num_logits: None)


def eagerly(patch) -> None:
    """From here on no step fits a graph."""
    without_graphs(patch)
    patch.setattr(DecodeGraphs, "fits", lambda self, plan: False)


@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_graphs_equal_the_eager_path(driver, batch, monkeypatch):
    texts = {slot: slot for slot in range(batch)}
    tokens, logits = run(driver, texts, DRAWN)
    eager_tokens, eager_logits = run(driver, texts, DRAWN, partial(eagerly, monkeypatch))
    assert torch.equal(logits, eager_logits), f"relative error {relative_error(logits, eager_logits):.1e}"
    assert tokens == eager_tokens


@pytest.mark.parametrize("batch", [3, 50])
def test_padded_graphs_differ_from_the_eager_path_by_rounding(driver, batch, monkeypatch):
    texts = {slot: slot for slot in range(batch)}
    _, logits = run(driver, texts, FORCED)
    _, eager_logits = run(driver, texts, FORCED, partial(eagerly, monkeypatch))
    error = relative_error(logits, eager_logits)
    print(f"{batch} rows in a graph of more, against {batch} rows: relative error {error:.1e}")
    assert error < ROUNDING


def start_beside_others(
    driver: Driver, length: int, num_decoding: int, monkeypatch, sampling: SamplingParams = DRAWN
) -> tuple[list[int], torch.Tensor]:
    """A prompt of `length` tokens in a step with decode rows; returns the step's tokens and logits."""
    with monkeypatch.context() as patch:
        without_graphs(patch)  # the same pages and tokens to go on from, whichever way the step itself takes
        for slot in range(num_decoding):
            driver.start(slot, prompt(slot), DRAWN, seed=slot)
    generator = torch.Generator().manual_seed(length)
    text = torch.randint(0, SHAPES[SHAPE].vocab_size, (length,), generator=generator).tolist()
    tokens = driver.start_beside(range(num_decoding), num_decoding, text, sampling, seed=7)
    return tokens, driver.logits(num_decoding + 1)


# Together 64, 640 and, the budget, 714 tokens; 1, 8 and 40 of them are sampled from.
@pytest.mark.parametrize("sampling", [DRAWN, TOLD], ids=["plain", "full"])
@pytest.mark.parametrize(("length", "num_decoding"), [(64, 0), (57, 7), (601, 39), (MAX_LEN, 0)])
def test_graphs_of_prompts_equal_the_eager_path(driver, length, num_decoding, sampling, monkeypatch):
    tokens, logits = start_beside_others(driver, length, num_decoding, monkeypatch, sampling)
    without_graphs(monkeypatch)
    eager_tokens, eager_logits = start_beside_others(driver, length, num_decoding, monkeypatch, sampling)
    assert torch.equal(logits, eager_logits), f"relative error {relative_error(logits, eager_logits):.1e}"
    assert tokens == eager_tokens


def test_a_prompt_in_two_pieces_equals_the_eager_path(driver, monkeypatch):
    """Of the first piece's step nothing is sampled; the second continues its pages beside decode rows."""

    def compute() -> tuple[list[int], torch.Tensor]:
        with monkeypatch.context() as patch:
            without_graphs(patch)
            for slot in range(7):
                driver.start(slot, prompt(slot), DRAWN, seed=slot)
        tokens = driver.start_beside(range(7), 7, list(range(64 + 57)), DRAWN, seed=7, first_piece=64)
        return tokens, driver.logits(8)

    tokens, logits = compute()
    without_graphs(monkeypatch)
    eager_tokens, eager_logits = compute()
    assert torch.equal(logits, eager_logits), f"relative error {relative_error(logits, eager_logits):.1e}"
    assert tokens == eager_tokens


@pytest.mark.parametrize(("length", "num_decoding"), [(65, 0), (500, 3), (9, 1)])
def test_padded_graphs_of_prompts_differ_from_the_eager_path_by_rounding(
    driver, length, num_decoding, monkeypatch
):
    _, logits = start_beside_others(driver, length, num_decoding, monkeypatch)
    without_graphs(monkeypatch)
    _, eager_logits = start_beside_others(driver, length, num_decoding, monkeypatch)
    error = relative_error(logits, eager_logits)
    print(f"{length} + {num_decoding} tokens in a graph of more: relative error {error:.1e}")
    assert error < ROUNDING


@pytest.mark.parametrize("sampling", [DRAWN, FORCED], ids=["plain", "full"])
def test_neighbours_and_slots_change_no_bit(driver, sampling):
    """Seeded draws included: the same texts, each in another slot, among others, in another order."""
    here = {slot: slot for slot in range(16)}
    there = {63 - slot: slot if slot % 3 else 100 + slot for slot in range(16)}
    tokens, logits = run(driver, here, sampling)
    other_tokens, other_logits = run(driver, there, sampling)
    for row in range(16):
        if row % 3:
            assert torch.equal(logits[:, row], other_logits[:, row]), f"row {row} depends on its neighbours"
            assert tokens[row] == other_tokens[row]


def test_alone_and_in_a_batch_of_64(driver):
    _, together = run(driver, {slot: slot for slot in range(64)}, FORCED)
    assert relative_error(together[:, 0], together[:, 31]) > 10 * ROUNDING, "all texts have the same logits"
    for row in (0, 31, 63):
        _, alone = run(driver, {row: row}, FORCED)
        error = relative_error(alone[:, 0], together[:, row])
        print(f"text {row} alone against among 64: relative error {error:.1e}")
        assert error < ROUNDING


def test_a_seeded_draw_alone_equals_the_draw_in_a_batch(driver):
    """On the logits of a real step, with every filter."""
    run(driver, {slot: slot for slot in range(64)}, DRAWN)
    logits = driver.logits(64)

    def rows(value, dtype):
        return torch.full((64,), value, dtype=dtype, device=logits.device)

    slots = torch.arange(64, device=logits.device)
    parameters = (
        rows(1.0, torch.float32),
        rows(50, torch.int32),
        rows(0.9, torch.float32),
        rows(0.01, torch.float32),
        slots,  # as seeds
    )
    positions = rows(700, torch.int64)
    together = sample(logits, slots, *parameters, positions)
    alone = [
        sample(logits[row : row + 1], slots[row : row + 1], *parameters, positions[row : row + 1])
        for row in range(64)
    ]
    assert torch.equal(together, torch.cat(alone))
