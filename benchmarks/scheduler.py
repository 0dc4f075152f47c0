"""What planning and committing a step costs the loop: many sequences decode, more wait. No model, no torch.

    python -m benchmarks.scheduler [--running 512] [--waiting 10000]

Steps are planned one ahead, as the engine does, and every sampled token is made up. Median and 99th
percentile of plan() plus commit() over the steps in which all places are taken.
"""

import statistics
import time
from collections import deque
from typing import Any

import numpy as np

from benchmarks.common import parser, show
from engine.outputs import StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.schedule.scheduler import Scheduler

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 2_000
NUM_WARM_UP_STEPS = 50
NUM_STEPS = 500


def made_up(plan: StepPlan) -> StepOutput:
    """An output with the same token for every row that is sampled."""
    tokens = [(7,)] * len(plan.decode.slots) + [(7,) if row.sample else () for row in plan.chunks]
    return StepOutput(plan.step_id, tokens, 0.0, 0.01)


def measure(page_size: int, num_running: int, num_waiting: int) -> dict[str, Any]:
    """One row of the table."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    scheduler = Scheduler(
        num_pages=-(-length // page_size) * (num_running + 1),
        page_size=page_size,
        max_num_seqs=num_running,
        token_budget=8192,
        max_model_len=length,
        max_waiting=num_running + num_waiting,
        eos_token_ids=frozenset([2]),
    )
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for index in range(num_running + num_waiting):
        prompt = tuple(rng.integers(10, 30_000, PROMPT_TOKENS).tolist())
        scheduler.add(Request(str(index), prompt, sampling), seed=0, now=float(index))
    in_flight: deque[StepPlan] = deque()
    seconds = []
    while len(seconds) < NUM_STEPS + NUM_WARM_UP_STEPS:
        start = time.perf_counter()
        plan = scheduler.plan(time.perf_counter())
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append(plan)
        output = made_up(in_flight[0])
        if len(in_flight) < 2:
            continue
        begin = time.perf_counter()
        scheduler.commit(in_flight.popleft(), output)
        if len(plan.decode.slots) == num_running:
            seconds.append(planned - start + time.perf_counter() - begin)
    milliseconds = [1e3 * value for value in seconds[NUM_WARM_UP_STEPS:]]
    return {
        "page size": page_size,
        "running": num_running,
        "waiting": scheduler.num_waiting,
        "plan + commit, median ms": statistics.median(milliseconds),
        "p99 ms": float(np.percentile(milliseconds, 99)),
    }


def main() -> None:
    """Measure and print a row per page size and queue length."""
    flags = parser(__doc__)
    flags.add_argument("--running", type=int, default=512)
    flags.add_argument("--waiting", type=int, default=10_000)
    args = flags.parse_args()
    rows = [
        measure(page_size, running, waiting)
        for page_size in (16, 1)
        for running, waiting in ((args.running // 4, 0), (args.running, 0), (args.running, args.waiting))
    ]
    show("cost of a step on the loop", rows, args.json)


if __name__ == "__main__":
    main()
