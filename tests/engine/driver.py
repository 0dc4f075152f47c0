"""Drives a scheduler with the toy model, as the engine's loop would, with a clock of its own."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.outputs import StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import RequestChain, Sequence
from tests.engine.toy import EOS, ToyRunner

SEED = 7
REQUEST_FIELDS = (
    "use_prefix_cache",
    "cache_salt",
    "priority",
    "queue_timeout_seconds",
    "timeout_seconds",
    "readouts",
    "spans",
)


def make_request(prompt: list[int], max_tokens: int, **options) -> Request:
    """A request; options are its own fields and those of its SamplingParams."""
    own = {name: options.pop(name) for name in REQUEST_FIELDS if name in options}
    return Request("r", tuple(prompt), SamplingParams(max_tokens=max_tokens, **options), **own)


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()


@dataclass
class Driver:
    """A scheduler, the toy runner, and at most `run_ahead` steps between launch and commit."""

    num_pages: int = 64
    page_size: int = 4
    run_ahead: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    in_flight: deque[tuple[StepPlan, StepOutput | None]] = field(default_factory=deque)
    plans: list[StepPlan] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    num_failed_steps: int = 0
    read: dict[int, list[int]] = field(default_factory=dict)  # positions, by sequence id
    now: float = 0.0
    step_seconds: float = 1.0

    @classmethod
    def of(
        cls,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        run_ahead: int = 1,
        step_seconds: float = 1.0,
        **options: Any,
    ) -> "Driver":
        """`options` are arguments of Scheduler."""
        return cls(num_pages, page_size, run_ahead, options, step_seconds=step_seconds)

    def __post_init__(self):
        defaults = {"max_num_seqs": 8, "token_budget": 16, "max_waiting": 1000}
        defaults["max_model_len"] = self.num_pages * self.page_size
        self.scheduler = Scheduler(
            num_pages=self.num_pages,
            page_size=self.page_size,
            eos_token_ids=frozenset([EOS]),
            run_ahead=self.run_ahead,
            **(defaults | self.options),
        )
        windows = self.options.get("kv_windows", (0,))
        self.runner = ToyRunner(
            self.num_pages, self.page_size, windows=windows, short_context=self.options.get("short_context")
        )

    def add(self, prompt: list[int], max_tokens: int = 10, **options) -> Sequence:
        return self.scheduler.add(make_request(prompt, max_tokens, **options), seed=SEED, now=self.now)

    def add_group(
        self, prompt: list[int], n: int, max_tokens: int = 10, chain: RequestChain | None = None, **options
    ) -> list[Sequence]:
        requests = [make_request(prompt, max_tokens, **options) for _ in range(n)]
        return self.scheduler.add_group(requests, seeds=range(SEED, SEED + n), now=self.now, chain=chain)

    def launch(self, *, fails: bool = False) -> bool:
        """Plan and compute a step. One that `fails` leaves garbage where it computed."""
        scheduler = self.scheduler
        self.finished += scheduler.reap()
        self.finished += [sequence for sequence, _ in scheduler.expire(self.now)]
        plan = scheduler.plan(self.now)
        if plan is None:
            return False
        self.plans.append(plan)
        output = self.runner.launch(plan).wait()
        start = self.now
        self.now += self.step_seconds
        if fails:
            self.runner.spoil(plan)
        self.in_flight.append(
            (plan, None if fails else output._replace(start_seconds=start, end_seconds=self.now))
        )
        return True

    def commit(self) -> None:
        plan, output = self.in_flight.popleft()
        if output is None:
            self.num_failed_steps += 1
            self.finished += self.scheduler.fail(plan)
        else:
            for index, parts in plan.readouts.items():
                for part in parts:
                    read = self.read.setdefault(plan.sequence_ids[index], [])
                    read.extend(range(part.start, part.start + part.num_tokens))
            self.finished += [s for s, _ in self.scheduler.commit(plan, output) if s.is_finished]

    def step(self) -> bool:
        """What the engine's loop does once; False when there is nothing left to do."""
        launched = self.launch()
        if self.in_flight and (not launched or len(self.in_flight) > self.run_ahead):
            self.commit()
            return True
        return launched

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.step():
                self.scheduler.check_idle()
                return
        pytest.fail(
            f"not done after {max_steps} steps: {self.scheduler.num_waiting=} {self.scheduler.num_running=}"
        )

    @property
    def num_prefilled(self) -> int:
        """Tokens computed that the host knew."""
        return sum(len(token_ids) for plan in self.plans for token_ids in plan.token_ids.values())
