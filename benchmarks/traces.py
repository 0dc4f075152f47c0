"""Made-up requests for benchmarks.simulate: when they arrive, and how long they are. Fixed seeds.

Lengths are lognormal, with the means of ShareGPT in the vLLM paper (Kwon et al., SOSP 2023, figure 11): 161
prompt tokens, 338 output tokens. Clients allow 2,048 tokens; nobody knows how many it will be.

    chat      Poisson arrivals
    overload  the same, more of them than can be served
    bursts    the same requests on average, but ten seconds of four times as many after each thirty of none
    prefixes  three of four begin with one of 16 system prompts of 500 to 2,000 tokens
    giants    one of 500 has a prompt of 16,000 tokens
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.request import Request, SamplingParams

MAX_TOKENS = 2_048
MEAN_PROMPT, PROMPT_SIGMA, MAX_PROMPT = 161, 1.1, 4_096
MEAN_OUTPUT, OUTPUT_SIGMA = 338, 0.9
FIRST_ID, LAST_ID = 10, 30_000
BURST_SECONDS, CALM_SECONDS = 10.0, 30.0
NUM_SYSTEM_PROMPTS = 16
GIANT_EVERY, GIANT_PROMPT = 500, 16_000


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and the output tokens it will have."""

    seconds: float
    request: Request
    num_output_tokens: int


class Draw:
    """Random numbers of one trace."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def lengths(self, count: int, mean: int, sigma: float, largest: int) -> list[int]:
        """Lognormal lengths from 1 to `largest`, with this mean before they are cut."""
        values = self.rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
        lengths: list[int] = np.clip(np.rint(values), 1, largest).astype(int).tolist()
        return lengths

    def tokens(self, count: int) -> tuple[int, ...]:
        """Token ids that nobody else has."""
        return tuple(self.rng.integers(FIRST_ID, LAST_ID, count).tolist())

    def poisson(self, count: int, rate: float) -> list[float]:
        """Moments of arrival, in seconds."""
        moments: list[float] = self.rng.exponential(1 / rate, count).cumsum().tolist()
        return moments


def chat(count: int, rate: float) -> list[Arrival]:
    """Requests with nothing in common."""
    draw = Draw(1)
    prompts = [draw.tokens(length) for length in draw.lengths(count, MEAN_PROMPT, PROMPT_SIGMA, MAX_PROMPT)]
    return arrivals(draw, draw.poisson(count, rate), prompts)


def bursts(count: int, rate: float) -> list[Arrival]:
    """The moments of busy seconds, with calm ones put between them."""
    share = BURST_SECONDS / (BURST_SECONDS + CALM_SECONDS)
    return [
        Arrival(
            arrival.seconds + CALM_SECONDS * (arrival.seconds // BURST_SECONDS),
            arrival.request,
            arrival.num_output_tokens,
        )
        for arrival in chat(count, rate / share)
    ]


def prefixes(count: int, rate: float) -> list[Arrival]:
    """Some system prompts are used much more often than others."""
    draw = Draw(2)
    system = [draw.tokens(int(length)) for length in draw.rng.integers(500, 2_000, NUM_SYSTEM_PROMPTS)]
    weights = 1 / np.arange(1, NUM_SYSTEM_PROMPTS + 1)
    choices = draw.rng.choice(NUM_SYSTEM_PROMPTS, count, p=weights / weights.sum()).tolist()
    has_one = (draw.rng.random(count) < 0.75).tolist()
    lengths = draw.lengths(count, MEAN_PROMPT, PROMPT_SIGMA, MAX_PROMPT)
    prompts = [
        (system[choice] if has else ()) + draw.tokens(length)
        for choice, has, length in zip(choices, has_one, lengths, strict=True)
    ]
    return arrivals(draw, draw.poisson(count, rate), prompts)


def giants(count: int, rate: float) -> list[Arrival]:
    """A giant now and then among dwarfs."""
    draw = Draw(3)
    lengths = draw.lengths(count, MEAN_PROMPT, PROMPT_SIGMA, MAX_PROMPT)
    lengths[GIANT_EVERY // 2 :: GIANT_EVERY] = [GIANT_PROMPT] * len(lengths[GIANT_EVERY // 2 :: GIANT_EVERY])
    return arrivals(draw, draw.poisson(count, rate), [draw.tokens(length) for length in lengths])


def arrivals(draw: Draw, moments: list[float], prompts: list[tuple[int, ...]]) -> list[Arrival]:
    """Requests with these prompts at these moments."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    outputs = draw.lengths(len(prompts), MEAN_OUTPUT, OUTPUT_SIGMA, MAX_TOKENS)
    return [
        Arrival(seconds, Request(str(index), prompt, sampling), num_output_tokens)
        for index, (seconds, prompt, num_output_tokens) in enumerate(
            zip(moments, prompts, outputs, strict=True)
        )
    ]


# Each with its arrivals per second: 95 % of what came out of benchmarks.simulate, with the default policy,
# when far too many arrived; half of it where they come in bursts (four times that in a burst, and time to
# catch up after it). And once a little more than anybody can serve.
TRACES: dict[str, tuple[Callable[[int, float], list[Arrival]], float]] = {
    "chat": (chat, 33.0),
    "overload": (chat, 36.0),
    "bursts": (bursts, 16.5),
    "prefixes": (prefixes, 19.5),
    "giants": (giants, 30.5),
}
