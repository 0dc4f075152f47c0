"""What the prefix cache saves: the first token of a second request with the same beginning as the first.

    python -m benchmarks.prefix [--pairs 3]

The default model in this process. Each pair has a beginning of its own, 2,000 random tokens, and two ends.
"""

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from benchmarks.common import parser, show
from engine import Engine
from engine.config import EngineConfig
from engine.request import Request, SamplingParams

BEGINNING_TOKENS = 2_000
END_TOKENS = 20


async def seconds_to_first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Time to the first token of a greedy answer, and how many tokens of the prompt were there already."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    stream = engine.submit(Request("r", tuple(prompt), sampling))
    await stream.collect()
    return time.perf_counter() - start, stream.num_cached_tokens


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each pair."""
    engine = await Engine.start(EngineConfig(device="cpu"))
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, engine.model.vocab_size) for _ in range(count)]

    try:
        await seconds_to_first_token(engine, tokens(512))  # warm-up
        rows = []
        for _ in range(args.pairs):
            beginning = tokens(BEGINNING_TOKENS)
            first, _ = await seconds_to_first_token(engine, beginning + tokens(END_TOKENS))
            second, cached = await seconds_to_first_token(engine, beginning + tokens(END_TOKENS))
            rows.append({"first s": first, "second s": second, "cached": cached, "%": 100 * second / first})
    finally:
        await engine.stop()
    shares = [row["%"] for row in rows]
    rows.append({"first s": "", "second s": "", "cached": "median", "%": statistics.median(shares)})
    return rows


def main() -> None:
    """Measure and print."""
    flags = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=3)
    args = flags.parse_args()
    show("time to the first token, the same beginning twice", asyncio.run(measure(args)), args.json)


if __name__ == "__main__":
    main()
