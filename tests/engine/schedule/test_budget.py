"""The step budget against machines with known costs."""

from collections import deque
from dataclasses import dataclass

import pytest

from engine.schedule.budget import MIN_CHUNK, StepBudget


def keys(num_tokens: int, context: int) -> float:
    """Return the number of keys that tokens after `context` others attend to, in sum."""
    return num_tokens * (context + num_tokens / 2)


@dataclass
class Machine:
    """The cost of a step in seconds: a constant, its decode rows, its prompt tokens and their keys."""

    constant: float
    per_row: float
    per_token: float
    per_pair: float = 0.0
    per_mixed_step: float = 0.0

    def seconds(self, num_rows: int, num_tokens: int, context: int) -> float:
        mixed = self.per_mixed_step if num_tokens else 0.0
        tokens = num_tokens * self.per_token + keys(num_tokens, context) * self.per_pair
        return self.constant + num_rows * self.per_row + tokens + mixed


GPU = Machine(0.005, 0.00001, 0.00002, 2e-10, per_mixed_step=0.004)
# Where a context of 16,000 tokens makes the last of them five times as dear as the first.
SMALL_ON_GPU = Machine(0.001, 0.00001, 0.000003, 9e-10, per_mixed_step=0.0003)
LAPTOP = Machine(0.010, 0.002, 0.002, 3e-8)


def prefill(budget: StepBudget, machine: Machine, prompt: int, rows: int, run_ahead: int = 1) -> list[float]:
    """Return the seconds of the steps that compute a prompt beside decode rows, after steps of decoding."""
    for _ in range(20):
        budget.observe(rows, 0, 0, machine.seconds(rows, 0, 0))
    steps, in_flight, done = [], deque(), 0
    while done < prompt or in_flight:
        if done < prompt:
            chunk = min(budget.prefill_tokens(rows, done), prompt - done)
            in_flight.append((chunk, done, machine.seconds(rows, chunk, done)))
            done += chunk
        if len(in_flight) > run_ahead or done >= prompt:
            chunk, start, seconds = in_flight.popleft()
            budget.observe(rows, chunk, keys(chunk, start), seconds)
            steps.append(seconds)
    return steps


@pytest.mark.parametrize(
    ("machine", "prompt", "target", "max_tokens"),
    [
        (GPU, 16_000, 0.020, 8192),
        (GPU, 100_000, 0.050, 8192),
        (SMALL_ON_GPU, 16_000, 0.0075, 8192),
        (LAPTOP, 6_000, 0.25, 512),
    ],
)
def test_steps_approach_the_target_time(machine, prompt, target, max_tokens, run_ahead):
    budget = StepBudget(max_tokens, target)
    steps = prefill(budget, machine, prompt, rows=32, run_ahead=run_ahead)
    assert max(steps) <= 1.3 * target
    settled = steps[12:-1]
    assert min(settled) >= 0.7 * target, "the steps use the time that is left"
    again = prefill(budget, machine, prompt, rows=32, run_ahead=run_ahead)
    assert sum(again) <= 1.01 * sum(steps), "the costs learned are kept"


def test_the_whole_budget_is_used_without_a_target_or_decode_rows():
    assert StepBudget(512, None).prefill_tokens(100, 0) == 412
    assert StepBudget(512, 0.001).prefill_tokens(0, 0) == 512


def test_chunks_grow_where_even_a_small_one_exceeds_the_target():
    """Any prompt token exceeds the target: the steps take longer, but the prompt is computed in few."""
    machine = Machine(0.001, 0.00001, 0.000005, per_mixed_step=0.003)
    steps = prefill(StepBudget(8192, 0.0025), machine, 16_000, rows=32)
    # Half of a step's extra time is for tokens: 600 of them, once that is known.
    assert len(steps) < 2 * 16_000 / 600
    assert max(steps) < 0.00132 + 2.5 * 0.003


def test_a_small_last_chunk_does_not_shrink_later_chunks():
    budget = StepBudget(8192, 0.020)
    prefill(budget, GPU, 16_000, rows=32)
    before = budget.prefill_tokens(32, 1000)
    budget.observe(32, 20, keys(20, 16_000), GPU.seconds(32, 20, 16_000))
    assert budget.prefill_tokens(32, 1000) == before


def test_one_slow_step_with_few_tokens_is_forgotten():
    """The first chunk has MIN_CHUNK tokens, and its step was slow for another reason."""
    budget = StepBudget(8192, 0.020)
    for _ in range(20):
        budget.observe(32, 0, 0, GPU.seconds(32, 0, 0))
    budget.observe(32, MIN_CHUNK, keys(MIN_CHUNK, 0), 0.1)
    assert max(prefill(budget, GPU, 16_000, rows=32)) <= 1.3 * 0.020


def test_chunks_shrink_when_the_machine_becomes_slower():
    budget = StepBudget(8192, 0.020)
    prefill(budget, GPU, 16_000, rows=32)
    slow = Machine(0.005, 0.00001, 0.00006, 2e-10, per_mixed_step=0.004)
    assert max(prefill(budget, slow, 30_000, rows=32)[6:]) <= 1.3 * 0.020


def test_prompts_progress_even_if_the_target_cannot_be_met():
    budget = StepBudget(512, 0.001)
    steps = prefill(budget, LAPTOP, 1000, rows=32)
    assert steps
    assert budget.prefill_tokens(32, 1000) <= 2 * MIN_CHUNK, "tokens for twice the time of MIN_CHUNK"
    assert budget.prefill_tokens(500, 0) == 12, "never more than the budget has room for"
