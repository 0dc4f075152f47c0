"""What each setting of overcommit costs and gains: the real scheduler, made-up requests, no model, no torch.

    python -m benchmarks.overcommit [--requests 2000]

All requests are there from the start; the pool holds 65,536 tokens. Prompts and outputs have lognormal
lengths, outputs with a median of 256; clients allow 2,048. Counted are steps, not seconds: a step computes a
token for each running sequence and up to 2,048 tokens in all.
"""

import random
import statistics
from collections import deque
from typing import Any

from benchmarks.common import parser, show
from engine.outputs import StepOutput, StepPlan
from engine.request import Request, SamplingParams
from engine.schedule.scheduler import Scheduler

POOL_TOKENS = 65_536
PAGE_SIZE = 16
MAX_NUM_SEQS = 512
RUN_AHEAD = 1
MEDIAN_PROMPT = 384
MEDIAN_OUTPUT = 256
MAX_TOKENS = 2_048
EOS = 2


def make_scheduler(num_requests: int, *, pool_tokens: int = POOL_TOKENS, **options: Any) -> Scheduler:
    """The engine's own, one step ahead, with room in the queue for all requests."""
    return Scheduler(
        num_pages=pool_tokens // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        run_ahead=RUN_AHEAD,
        max_waiting=num_requests,
        eos_token_ids=frozenset([EOS]),
        **options,
    )


def lognormal(rng: random.Random, median: float, sigma: float, largest: int) -> int:
    """A length: half of them are below the median, some are many times as long."""
    return max(1, min(largest, round(median * rng.lognormvariate(0.0, sigma))))


def measure(overcommit: float, num_requests: int) -> dict[str, Any]:
    """One row of the table."""
    scheduler = make_scheduler(num_requests, overcommit=overcommit, token_budget=2048, max_model_len=8192)
    rng = random.Random(0)
    lengths, num_prompt_tokens = {}, 0
    for index in range(num_requests):
        prompt = tuple(rng.randrange(10, 30_000) for _ in range(lognormal(rng, MEDIAN_PROMPT, 0.6, 4096)))
        request = Request(str(index), prompt, SamplingParams(max_tokens=MAX_TOKENS))
        sequence = scheduler.add(request, seed=0, now=float(index))
        lengths[sequence.id] = len(prompt) + lognormal(rng, MEDIAN_OUTPUT, 0.9, MAX_TOKENS)
        num_prompt_tokens += len(prompt)
    in_flight: deque[StepPlan] = deque()
    num_running, num_prefilled = [], 0
    while (plan := scheduler.plan(0.0)) is not None or in_flight:
        if plan is not None:
            in_flight.append(plan)
            num_running.append(scheduler.num_running)
            num_prefilled += plan.num_tokens - plan.num_decode_rows
        if plan is None or len(in_flight) > RUN_AHEAD:
            oldest = in_flight.popleft()
            scheduler.commit(oldest, output_of(oldest, lengths))
    return {
        "overcommit": overcommit,
        "steps": len(num_running),
        "running, mean": statistics.mean(num_running),
        "preemptions per 100 requests": 100 * scheduler.num_preemptions / num_requests,
        "tokens computed again, %": 100 * (num_prefilled / num_prompt_tokens - 1),
    }


def output_of(plan: StepPlan, lengths: dict[int, int]) -> StepOutput:
    """A step's samples: the end of a sequence where it has its length."""
    columns = zip(plan.sequence_ids, plan.starts, plan.query_lens, plan.num_logits, strict=True)
    tokens = [
        (EOS if start + query_len + 1 >= lengths[sequence_id] else 7,) * num_logits
        for sequence_id, start, query_len, num_logits in columns
    ]
    return StepOutput(plan.step_id, tokens, 0.0, 0.01)


def main() -> None:
    """Measure and print a row for each setting."""
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=2_000)
    args = flags.parse_args()
    rows = [measure(overcommit, args.requests) for overcommit in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
    show("admission policies", rows, args.json)


if __name__ == "__main__":
    main()
