"""Rotary position embedding: inverse frequencies of every scaling variant, and the kernel's table.

All angles are computed in float32, with the operations of transformers in their order, so that both give the
same bits. Sources: RoFormer (Su et al., 2021); linear interpolation (Chen et al., 2023); dynamic NTK scaling;
YaRN (Peng et al., 2023); LongRoPE (Ding et al., 2024); the frequency bands of Llama 3.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import ModelError


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows once the context exceeds `original_max_position`; below that it is plain RoPE."""

    factor: float
    original_max_position: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between the two bands."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """A ramp from interpolated low frequencies to unscaled high ones; cos and sin times a factor."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FactorScaling:
    """One divisor per frequency, from the tensor `rope_freqs.weight` of a GGUF file."""

    divisors: tuple[float, ...]


@dataclass(frozen=True)
class LongRopeScaling:
    """One divisor per frequency: `short` in sequences of up to `original_max_position` tokens, else `long`.

    The length of a sequence decides for all of its positions. cos and sin are multiplied by
    `attention_factor`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float


@dataclass(frozen=True)
class ProportionalScaling:
    """Only the first `num_angles` pairs rotate, at frequencies of the whole head over `factor`."""

    factor: float
    num_angles: int


RopeScaling = (
    LinearScaling
    | DynamicScaling
    | Llama3Scaling
    | YarnScaling
    | FactorScaling
    | LongRopeScaling
    | ProportionalScaling
)


@dataclass(frozen=True)
class QueryScaling:
    """Multiplies rotated queries by `1 + beta * log(1 + floor(position / window))`, as in Llama 4."""

    beta: float
    window: int

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """Return the factors of all positions, [num_positions] fp32."""
        positions = torch.arange(num_positions, device=device)
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.window))


@dataclass(frozen=True)
class RopeSpec:
    """Base `theta`, the number of rotated elements per head (`dim`, even), and the scaling, if any.

    The first `dim` elements of a head are rotated in pairs: i and i + dim / 2, or if `interleaved` 2i and
    2i + 1.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    query_scaling: QueryScaling | None = None

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim <= 0:
            raise ModelError(f"RoPE cannot rotate {self.dim} elements of a head: they are taken in pairs")


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies [dim / 2] fp32 and the factor on cos and sin.

    `num_positions` is the context's length: dynamic scaling and LongRoPE depend on it.
    """
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        ratio = max(num_positions, scaling.original_max_position) / scaling.original_max_position
        stretch = (scaling.factor * ratio - (scaling.factor - 1)) ** (rope.dim / (rope.dim - 2))
        return 1.0 / _wavelengths(rope.theta * stretch, rope.dim), 1.0
    wavelengths = _wavelengths(rope.theta, rope.dim)
    inverse = 1.0 / wavelengths
    match scaling:
        case None:
            return inverse, 1.0
        case LinearScaling(factor):
            return inverse / factor, 1.0
        case FactorScaling(divisors):
            if len(divisors) != rope.dim // 2:
                raise ModelError(f"{len(divisors)} RoPE factors for {rope.dim // 2} frequencies")
            return inverse / torch.tensor(divisors, dtype=torch.float32), 1.0
        case Llama3Scaling():
            return _llama3(inverse, scaling), 1.0
        case ProportionalScaling(factor, num_angles):
            inverse[num_angles:] = 0.0
            return inverse / factor, 1.0
        case LongRopeScaling(short, long, original, attention_factor):
            divisors = long if num_positions > original else short
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * wavelengths), attention_factor
        case YarnScaling():
            return _yarn(wavelengths, rope, scaling), scaling.attention_factor


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Return theta^(2i / dim), the wavelengths over 2π."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    powers: Tensor = theta**exponents
    return powers


def _llama3(inverse: Tensor, s: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / inverse
    longest_kept = s.original_max_position / s.high_freq_factor
    shortest_scaled = s.original_max_position / s.low_freq_factor
    smooth = (s.original_max_position / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    between = (1 - smooth) * inverse / s.factor + smooth * inverse
    scaled = torch.where(wavelength > shortest_scaled, inverse / s.factor, between)
    return torch.where(wavelength < longest_kept, inverse, scaled)


def _yarn(wavelengths: Tensor, rope: RopeSpec, s: YarnScaling) -> Tensor:
    def element_of(rotations: float) -> float:
        """Return the element that turns `rotations` times over the original window."""
        turns = s.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = element_of(s.beta_fast), element_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (s.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def cos_sin_table(rope: RopeSpec, num_positions: int, device: torch.device) -> Tensor:
    """Return cos and sin of every angle, [num_positions, 2, dim / 2] fp32; a step gathers its rows.

    They are those of a sequence of `num_positions` tokens.
    """
    if device.type == "meta":  # where arithmetic imports torch._dynamo and sympy: a second, and 70 MB
        return torch.empty(num_positions, 2, rope.dim // 2, device=device)
    inverse, factor = inverse_frequencies(rope, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inverse.to(device)
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)
