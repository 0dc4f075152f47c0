"""A model of the step time on one H100 for an 8B shape, fitted to seven measured steps.

    seconds = max(weights, fixed + per_token * tokens)    the matrix products: reading weights, or computing
              + per_key * keys                            KV that decode rows read
              + per_pair * pairs                          queries times keys of prompt tokens

`per_key` is not fitted: it is the KV bytes of a token at the copy bandwidth of the same page. The other four
are the least squares of relative errors over the seven steps, the smaller decode steps being
bound by the weights, all others by their tokens.

    python -m benchmarks.step_time_model      prints them, and every step of the table beside the model
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import parser, show
from engine.outputs import StepPlan

KV_BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2  # keys and values, layers, KV heads, head_dim, bf16
COPY_BYTES_PER_SECOND = 2.9e12
# On an H100, before steps with prompts had CUDA graphs; later figures: docs/performance.md.
DECODE_CONTEXT = 576  # the decode steps go from 512 to 640
DECODE_MILLISECONDS = {1: 6.22, 16: 6.68, 64: 8.21, 256: 14.47}
# Middles of the ranges; for 512 tokens the host that kept up with the device.
PREFILL_MILLISECONDS = {512: 13.6, 2048: 48.45, 8192: 221.3}
MAX_WEIGHT_BOUND_ROWS = 64


class Work(NamedTuple):
    """What a step computes: tokens in all, keys its decode rows read, queries times keys of prompts."""

    num_tokens: int
    num_keys: int
    num_pairs: int

    @classmethod
    def of(cls, plan: StepPlan) -> "Work":
        """The work of a plan."""
        prompts = [(plan.starts[row], plan.query_lens[row]) for row in plan.token_ids]
        pairs = sum(query_len * (2 * start + query_len) for start, query_len in prompts) // 2
        num_decode = plan.num_decode_rows
        return cls(plan.num_tokens, sum(plan.starts[:num_decode]) + num_decode, pairs)


@dataclass(frozen=True)
class StepTime:
    """The coefficients, in seconds."""

    weights: float
    fixed: float
    per_token: float
    per_key: float
    per_pair: float

    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        products = max(self.weights, self.fixed + self.per_token * work.num_tokens)
        return products + self.per_key * work.num_keys + self.per_pair * work.num_pairs


def table() -> list[tuple[str, Work, float]]:
    """The steps that were measured: name, work, seconds."""
    decode = [
        (f"decode, batch {rows}", Work(rows, rows * DECODE_CONTEXT, 0), 1e-3 * milliseconds)
        for rows, milliseconds in DECODE_MILLISECONDS.items()
    ]
    prefill = [
        (f"prefill, {tokens:,} tokens", Work(tokens, 0, tokens**2 // 2), 1e-3 * milliseconds)
        for tokens, milliseconds in PREFILL_MILLISECONDS.items()
    ]
    return decode + prefill


def fit() -> StepTime:
    """The model of the steps."""
    per_key = KV_BYTES_PER_TOKEN / COPY_BYTES_PER_SECOND
    rows, rest = [], []
    for _, work, seconds in table():
        is_weight_bound = work.num_tokens <= MAX_WEIGHT_BOUND_ROWS
        products = [1, 0, 0] if is_weight_bound else [0, 1, work.num_tokens]
        rows.append(np.array([*products, work.num_pairs], float) / seconds)
        rest.append(1.0 - per_key * work.num_keys / seconds)
    matrix = np.array(rows)
    scale = matrix.max(axis=0)  # seconds and nanoseconds in one system
    weights, fixed, per_token, per_pair = np.linalg.lstsq(matrix / scale, np.array(rest))[0] / scale
    return StepTime(float(weights), float(fixed), float(per_token), per_key, float(per_pair))


def main() -> None:
    """Print the coefficients, and the table beside the model."""
    args = parser(__doc__).parse_args()
    model = fit()
    print(model)
    rows: list[dict[str, Any]] = [
        {
            "step": name,
            "measured ms": 1e3 * seconds,
            "model ms": 1e3 * model.seconds(work),
            "error %": 100 * (model.seconds(work) / seconds - 1),
        }
        for name, work, seconds in table()
    ]
    show("step times, 8B shape on one H100", rows, args.json)


if __name__ == "__main__":
    main()
