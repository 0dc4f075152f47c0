"""Replays traces through the real scheduler with a step-time model, and compares admission policies.

    python -m benchmarks.simulate [--trace chat] [--requests 20000] [--json FILE] [--plot FILE.svg]

The device is benchmarks.step_time_model: an 8B shape on one H100. A pool of 65,536 tokens (8.6 GB of bf16 KV)
makes memory what requests wait for. Steps are planned one ahead, as the engine does; what the host does in
between takes no time here (on the GPU it leaves the device idle for 0.5 % of workload W). The traces are
those of benchmarks.traces. Goodput counts the requests with a first token within 2 s and 50 ms between tokens
on average.

The policies are values of one setting. Its ends are the naive ones: overcommit 1 admits all whose prompt
fits, 0 reserves room for max_tokens. In between the predicted peak decides; the last has a target step time.
"""

import gc
import json
import time
from array import array
from collections import abc, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, parser, show
from benchmarks.overcommit import POOL_TOKENS, RUN_AHEAD, make_scheduler, output_of
from benchmarks.plots import draw
from benchmarks.step_time_model import StepTime, Work, fit
from benchmarks.traces import TRACES, Arrival
from engine.outputs import StepPlan
from engine.request import Request, SamplingParams

TOKEN_BUDGET = 8_192
MAX_MODEL_LEN = 32_768
MAX_TTFT_SECONDS = 2.0
MAX_ITL_SECONDS = 0.050
WORKLOAD_W = Path(__file__).parent / "data" / "workload_w.json"
WORKLOAD_W_SECONDS = 33_313 / 5_926  # on the H100, in docs/performance.md


@dataclass(frozen=True)
class Policy:
    """Who starts."""

    name: str
    overcommit: float
    target_step_seconds: float | None = None


POLICIES = (
    Policy("admit all", 1.0),
    Policy("reserve max_tokens", 0.0),
    Policy("overcommit 0.25", 0.25),
    Policy("overcommit 0.5", 0.5),
    Policy("overcommit 0.75", 0.75),
    Policy("overcommit 0.9", 0.9),
    Policy("0.5, step 25 ms", 0.5, 0.025),
)


@dataclass
class Times:
    """When the requests of a trace, by their index, got their tokens."""

    arrivals: abc.Sequence[Arrival]
    first: "array[float]" = field(init=False)
    last: "array[float]" = field(init=False)
    gaps: "array[float]" = field(default_factory=lambda: array("f"))

    def __post_init__(self) -> None:
        nothing = [0.0] * len(self.arrivals)
        self.first, self.last = array("d", nothing), array("d", nothing)

    def tokens(self, sequence_ids: abc.Sequence[int], now: float) -> None:
        """One more token for each of these."""
        first, last, gaps = self.first, self.last, self.gaps
        for index in sequence_ids:
            if first[index]:
                gaps.append(now - last[index])
            else:
                first[index] = now
            last[index] = now

    def figures(self) -> dict[str, Any]:
        """Throughput, goodput and latencies."""
        arrived = np.array([arrival.seconds for arrival in self.arrivals])
        lengths = np.array([arrival.num_output_tokens for arrival in self.arrivals])
        first, last = np.asarray(self.first), np.asarray(self.last)
        elapsed = float(last.max() - arrived[0])
        ttft, itl = first - arrived, (last - first) / np.maximum(1, lengths - 1)
        is_good = (ttft <= MAX_TTFT_SECONDS) & (itl <= MAX_ITL_SECONDS)
        return {
            "tokens/s": round(int(lengths.sum()) / elapsed),
            "requests/s": len(first) / elapsed,
            "goodput/s": int(is_good.sum()) / elapsed,
            **{f"TTFT p{p} s": float(np.percentile(ttft, p)) for p in (50, 99)},
            **{f"ITL p{p} ms": 1e3 * float(np.percentile(self.gaps, p)) for p in (50, 99)},
        }


def replay(
    policy: Policy, arrivals: abc.Sequence[Arrival], step_time: StepTime, pool_tokens: int = POOL_TOKENS
) -> dict[str, Any]:
    """One row: a trace under a policy."""
    started = time.perf_counter()
    scheduler = make_scheduler(
        len(arrivals),
        pool_tokens=pool_tokens,
        overcommit=policy.overcommit,
        target_step_seconds=policy.target_step_seconds,
        token_budget=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
    )
    ends = {
        index: len(arrival.request.prompt_token_ids) + arrival.num_output_tokens
        for index, arrival in enumerate(arrivals)
    }
    times = Times(arrivals)
    in_flight: deque[tuple[StepPlan, float, float]] = deque()
    now, device_free, used_page_seconds, num_next = 0.0, 0.0, 0.0, 0
    while True:
        while num_next < len(arrivals) and arrivals[num_next].seconds <= now:
            arrival = arrivals[num_next]
            assert scheduler.add(arrival.request, seed=0, now=arrival.seconds).id == num_next
            num_next += 1
        plan = scheduler.plan(now)
        if plan is not None:
            start = max(now, device_free)
            device_free = start + step_time.seconds(Work.of(plan))
            used_page_seconds += scheduler.pool.num_used * (device_free - start)
            in_flight.append((plan, start, device_free))
        if in_flight and (plan is None or len(in_flight) > RUN_AHEAD):
            landed, start, end = in_flight.popleft()
            now = max(now, end)
            output = output_of(landed, ends)._replace(start_seconds=start, end_seconds=end)
            times.tokens([sequence.id for sequence, _ in scheduler.commit(landed, output)], now)
        elif plan is None:
            scheduler.check_idle()
            if num_next == len(arrivals):
                break
            now = arrivals[num_next].seconds
    return {
        "policy": policy.name,
        **times.figures(),
        "preempted %": 100 * scheduler.num_preemptions / len(arrivals),
        "pool %": 100 * used_page_seconds / scheduler.pool.num_pages / now,
        "took s": round(time.perf_counter() - started),
    }


def check_against_workload_w(step_time: StepTime) -> None:
    """The whole way, with the requests that were measured on the GPU: all at once, and room for all."""
    lengths = json.loads(WORKLOAD_W.read_text())["requests"]
    rng = np.random.default_rng(0)
    arrivals = [
        Arrival(
            0.0,
            Request("w", tuple(rng.integers(10, 30_000, prompt).tolist()), SamplingParams(output)),
            output,
        )
        for prompt, output in lengths
    ]
    figures = replay(POLICIES[0], arrivals, step_time, pool_tokens=400_000)
    seconds = len(lengths) / figures["requests/s"]
    print(f"workload W takes {seconds:.2f} s here, {WORKLOAD_W_SECONDS:.2f} s on the GPU")


def main() -> None:
    """Replay every trace under every policy; print a table for each, and draw them."""
    flags = parser(__doc__)
    flags.add_argument("--requests", type=int, default=20_000)
    flags.add_argument("--trace", choices=TRACES, help="only this one")
    flags.add_argument("--plot", type=Path, metavar="FILE", help="draw it there, as SVG, PNG or PDF")
    args = flags.parse_args()
    step_time = fit()
    check_against_workload_w(step_time)
    results: dict[str, list[dict[str, Any]]] = {}
    for name in [args.trace] if args.trace else TRACES:
        make, rate = TRACES[name]
        arrivals = make(args.requests, rate)
        results[name] = []
        gc.collect()
        gc.freeze()
        for policy in POLICIES:
            results[name].append(replay(policy, arrivals, step_time))
        gc.unfreeze()
        show(f"{name}: {rate:g} requests/s", results[name], None)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
