"""The requests of a run: synthetic prompts of exact token lengths and arrival times, all from one seed."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Prompts are token ids, so their length is exact whatever the tokenizer. Every vocabulary in use holds these
# ids, and control tokens are below or above them.
TOKEN_IDS = range(1_000, 20_000)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its lengths, and when it arrives after the start (0: as soon as a stream is free)."""

    prompt_tokens: int
    output_tokens: int
    arrival_seconds: float
    body: dict[str, Any]


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Read `[[prompt tokens, output tokens], ...]` from a file. Raises ValueError that says what is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        lengths = [(int(prompt), int(output)) for prompt, output in document["requests"]]
    except OSError as error:
        raise ValueError(f"workload {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f'workload {path}: expected {{"requests": [[prompt, output], …]}}: {error!r}'
        ) from error
    if not lengths or min(min(pair) for pair in lengths) < 1:
        raise ValueError(f"workload {path}: it needs at least one request and lengths from 1 up")
    return lengths


def arrival_times(count: int, rate: float | None, kind: str, rng: random.Random) -> list[float]:
    """Seconds after the start at which each of `count` requests arrives; all 0 without a rate."""
    if rate is None:
        return [0.0] * count
    if kind == "fixed":
        return [index / rate for index in range(count)]
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def jobs(
    lengths: list[tuple[int, int]],
    model: str,
    seed: int,
    rate: float | None = None,
    arrivals: str = "poisson",
) -> list[Job]:
    """Make greedy streaming completions of exactly these lengths."""
    rng = random.Random(seed)
    times = arrival_times(len(lengths), rate, arrivals, random.Random(seed + 1))
    return [
        Job(
            prompt_tokens,
            output_tokens,
            time,
            {
                "model": model,
                "prompt": rng.choices(TOKEN_IDS, k=prompt_tokens),
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
        for (prompt_tokens, output_tokens), time in zip(lengths, times, strict=True)
    ]
