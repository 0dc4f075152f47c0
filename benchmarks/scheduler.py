"""What planning and committing a step costs the loop: many sequences decode, more wait. No model, no torch.

    python -m benchmarks.scheduler [--running 512] [--waiting 10000]

Steps are planned one ahead, as the engine does, and every sampled token is made up. Median and 99th
percentile of plan() plus commit(): first while the same sequences decode and the others wait for a slot, then
while they wait for pages and short outputs come and go, so that admission is asked all the time and every
start evicts cached pages.
"""

import gc
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
SHORT_PROMPT_TOKENS = 200
SHORT_OUTPUT_TOKENS = 400
NUM_WARM_UP_STEPS = 50
NUM_STEPS = 500


def made_up(plan: StepPlan) -> StepOutput:
    """An output with the same token for every row that is sampled."""
    tokens = [(7,) * num_logits for num_logits in plan.num_logits]
    return StepOutput(plan.step_id, tokens, 0.0, 0.01)


def decoding(page_size: int, num_running: int, num_waiting: int) -> Scheduler:
    """All slots are taken by long outputs."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    scheduler = Scheduler(
        num_pages=-(-length // page_size) * (num_running + 1),
        page_size=page_size,
        max_num_seqs=num_running,
        token_budget=8192,
        max_model_len=length,
        max_waiting=num_running + num_waiting,
        eos_token_ids=frozenset([2]),
        run_ahead=1,
    )
    add(scheduler, num_running + num_waiting, PROMPT_TOKENS, range(OUTPUT_TOKENS, OUTPUT_TOKENS + 1))
    return scheduler


def coming_and_going(page_size: int, num_running: int, num_waiting: int) -> Scheduler:
    """The pool has room for about `num_running` outputs of all lengths, and there are slots for more."""
    num_tokens = num_running * (SHORT_PROMPT_TOKENS + SHORT_OUTPUT_TOKENS // 4)
    scheduler = Scheduler(
        num_pages=num_tokens // page_size,
        page_size=page_size,
        max_num_seqs=4 * num_running,
        token_budget=8192,
        max_model_len=SHORT_PROMPT_TOKENS + SHORT_OUTPUT_TOKENS,
        max_waiting=20 * num_running + num_waiting,
        eos_token_ids=frozenset([2]),
        run_ahead=1,
    )
    lengths = range(SHORT_OUTPUT_TOKENS // 8, SHORT_OUTPUT_TOKENS)
    add(scheduler, 10 * num_running + num_waiting, SHORT_PROMPT_TOKENS, lengths)
    return scheduler


def add(scheduler: Scheduler, num_requests: int, num_prompt_tokens: int, lengths: range) -> None:
    """Queue requests with prompts that have nothing in common."""
    rng = np.random.default_rng(0)
    for index in range(num_requests):
        prompt = tuple(rng.integers(10, 30_000, num_prompt_tokens).tolist())
        sampling = SamplingParams(max_tokens=int(rng.choice(lengths)), ignore_eos=True)
        scheduler.add(Request(str(index), prompt, sampling), seed=0, now=float(index))


def measure(scheduler: Scheduler, page_size: int) -> dict[str, Any]:
    """One row of the table."""
    gc.collect()
    gc.freeze()  # requests that wait are no garbage, and looking at all of them again is no scheduling
    in_flight: deque[StepPlan] = deque()
    seconds, num_rows, num_started = [], [], []
    while len(seconds) < NUM_STEPS + NUM_WARM_UP_STEPS:
        start = time.perf_counter()
        plan = scheduler.plan(start)
        planned = time.perf_counter()
        assert plan is not None
        in_flight.append(plan)
        output = made_up(in_flight[0])
        if len(in_flight) < 2:
            continue
        begin = time.perf_counter()
        scheduler.commit(in_flight.popleft(), output)
        seconds.append(planned - start + time.perf_counter() - begin)
        num_rows.append(plan.num_decode_rows)
        num_started.append(len(plan.token_ids))
    gc.unfreeze()
    milliseconds = [1e3 * value for value in seconds[NUM_WARM_UP_STEPS:]]
    return {
        "page size": page_size,
        "rows": round(statistics.mean(num_rows[NUM_WARM_UP_STEPS:])),
        "starts": round(statistics.mean(num_started[NUM_WARM_UP_STEPS:]), 1),
        "waiting": scheduler.num_waiting,
        "plan + commit, median ms": statistics.median(milliseconds),
        "p99 ms": float(np.percentile(milliseconds, 99)),
    }


def main() -> None:
    """Measure and print a row for each scene, page size and queue length."""
    flags = parser(__doc__)
    flags.add_argument("--running", type=int, default=512)
    flags.add_argument("--waiting", type=int, default=10_000)
    args = flags.parse_args()
    sizes = ((args.running // 4, 0), (args.running, 0), (args.running, args.waiting))
    rows = [
        {"waits for": what, **measure(scene(page_size, running, waiting), page_size)}
        for what, scene in (("a slot", decoding), ("pages", coming_and_going))
        for page_size in (16, 1)
        for running, waiting in sizes
    ]
    show("cost of a step on the loop", rows, args.json)


if __name__ == "__main__":
    main()
