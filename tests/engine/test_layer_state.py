"""A layer with a fixed-size state per sequence: answers do not depend on chunks, neighbours or preemption."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.layers import Mlp, Part
from models.loader import random_decoder
from models.shapes import SHAPES
from models.spec import StateSpec
from tests.engine.driver import Driver, output_of

GREEDY = {"temperature": 0.0, "ignore_eos": True}
DECAY = 0.7


class Recurrence(Part):
    """An MLP plus a decaying sum of its inputs, which each sequence keeps in its slot."""

    def __init__(self, mlp: Mlp) -> None:
        self.mlp = mlp

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        (state,) = batch.states
        assert batch.row_slots is not None
        out = self.mlp(hidden, batch)
        starts = batch.attention[0].query_start.tolist()
        for row, slot in enumerate(batch.row_slots.tolist()):
            for token in range(starts[row], starts[row + 1]):
                state[slot] = DECAY * state[slot] + hidden[token]
                out[token] += state[slot]
        return out


@pytest.fixture(scope="module")
def recurrent() -> Decoder:
    tiny = SHAPES["tiny"]
    state = StateSpec((tiny.hidden_size,), torch.float32)
    spec = replace(tiny, layers=(replace(tiny.layers[0], state=state), *tiny.layers[1:]))
    with torch.inference_mode():
        decoder = random_decoder(spec, torch.float32, torch.device("cpu"))
    decoder.layers[0].mlp = Recurrence(decoder.layers[0].mlp)
    return decoder


def driver_around(
    model: Decoder, run_ahead: int, *, num_tokens: int = 1024, token_budget: int = 64, **options
):
    settings = EngineConfig(
        device="cpu", kv_tokens=num_tokens, max_num_seqs=4, page_size=16, run_ahead=run_ahead
    )
    runner = ModelRunner.around(model, settings, token_budget, ())
    driver = Driver.of(
        num_pages=runner.num_pages,
        page_size=16,
        run_ahead=run_ahead,
        token_budget=token_budget,
        max_num_seqs=4,
        has_states=runner.has_states,
        max_model_len=runner.max_model_len,
        **options,
    )
    driver.runner = runner
    return driver


def prompt_of(length: int) -> list[int]:
    return [(7 * place + length) % 250 for place in range(length)]


@pytest.fixture(scope="module")
def alone(recurrent) -> dict[int, list[int]]:
    """The answers to prompts of some lengths, each computed by itself and in one piece."""
    answers = {}
    for length in (1, 5, 20, 33, 50):
        driver = driver_around(recurrent, 0)
        sequence = driver.add(prompt_of(length), max_tokens=25, **GREEDY)
        driver.run()
        answers[length] = output_of(sequence)
    return answers


def test_the_state_matters(recurrent, alone, monkeypatch):
    monkeypatch.setattr("tests.engine.test_layer_state.DECAY", 0.0)
    driver = driver_around(recurrent, 0)
    sequence = driver.add(prompt_of(33), max_tokens=25, **GREEDY)
    driver.run()
    assert output_of(sequence) != alone[33]


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [({}, False), ({"token_budget": 7}, False), ({"num_tokens": 96, "overcommit": 1.0}, True)],
    ids=["batch", "chunks", "preemption"],
)
def test_answers_equal_those_computed_alone(recurrent, alone, run_ahead, options, is_preempted):
    driver = driver_around(recurrent, run_ahead, **options)
    sequences = [driver.add(prompt_of(length), max_tokens=25, **GREEDY) for length in alone]
    driver.run()
    assert bool(driver.scheduler.num_preemptions) == is_preempted
    for sequence in sequences:
        assert output_of(sequence) == alone[sequence.num_prompt_tokens]


def test_no_prefix_is_reused(recurrent, alone, run_ahead):
    """Pages hold only a part of what came before."""
    driver = driver_around(recurrent, run_ahead)
    for _ in range(2):
        again = driver.add(prompt_of(50), max_tokens=25, **GREEDY)
        driver.run()
        assert (output_of(again), again.num_cached_tokens) == (alone[50], 0)
    samples = driver.add_group(prompt_of(50), 3, max_tokens=25, **GREEDY)
    driver.run()
    assert [output_of(sample) for sample in samples] == [alone[50]] * 3
    assert not any(plan.page_copies for plan in driver.plans)


def test_drafts_are_not_verified(recurrent, alone):
    """A rejected draft would stay in the state."""
    driver = driver_around(recurrent, 0)
    sequence = driver.add(prompt_of(20), max_tokens=25, **GREEDY)
    while driver.step():
        if sequence.num_output_tokens:
            sequence.draft_token_ids = (1, 2)
    assert output_of(sequence) == alone[20]
    assert all(num_logits <= 1 for plan in driver.plans for num_logits in plan.num_logits)
