"""Rotary position embedding: inverse frequencies of every scaling variant, and the kernel's table.

All angles are computed in float32, with the operations of transformers in their order, so that both give the
same bits. Sources: RoFormer (Su et al., 2021); linear interpolation (Chen et al., 2023); dynamic NTK scaling;
YaRN (Peng et al., 2023); the frequency bands of Llama 3.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | FactorScaling


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

    def __post_init__(self) -> None:
        if self.dim % 2 or self.dim <= 0:
            raise ModelError(f"RoPE cannot rotate {self.dim} elements of a head: they are taken in pairs")


def parse_scaling(parameters: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    """Read `rope_scaling` (older config.json) or `rope_parameters` (transformers 5).

    `max_position` is the model's context window; variants that need the window of pretraining and do not
    name it fall back to it. Raises ModelError for a variant that is unknown or lacks a value.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return LinearScaling(float(parameters["factor"]))
        if kind == "dynamic":
            return DynamicScaling(float(parameters["factor"]), max_position)
        if kind == "llama3":
            return Llama3Scaling(
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                original,
            )
        if kind == "yarn":
            return _parse_yarn(parameters, original, max_position)
    except KeyError as error:
        raise ModelError(f"RoPE scaling of type '{kind}' lacks {error}") from None
    raise ModelError(f"RoPE scaling of type '{kind}' is not supported")


def _parse_yarn(parameters: Mapping[str, Any], original: int, max_position: int) -> YarnScaling:
    factor = float(parameters.get("factor") or max_position / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return YarnScaling(
        factor,
        original,
        float(attention_factor),
        float(parameters.get("beta_fast") or 32),
        float(parameters.get("beta_slow") or 1),
        bool(parameters.get("truncate", True)),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies [dim / 2] fp32 and the factor on cos and sin.

    `num_positions` is the longest context served; only dynamic scaling depends on it.
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
    """Return cos and sin of every angle, [num_positions, 2, dim / 2] fp32; a step gathers its rows."""
    inverse, factor = inverse_frequencies(rope, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * inverse.to(device)
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)
