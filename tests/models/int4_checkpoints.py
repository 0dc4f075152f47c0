"""Packs codes, scales and zeros as AutoAWQ, GPTQModel and compressed-tensors do, and writes checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes [n, m * 8] as int32 [n, m]: the bits 4 * i of each are those of code order[i] of eight."""
    packed = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for bits, place in enumerate(order):
        packed |= codes[:, place::8].long() << 4 * bits
    return packed.to(torch.uint32).view(torch.int32)


def quantized(weight: Tensor, group_size: int, asymmetric: bool, groups: Tensor | None = None):
    """Codes [n, k], scales fp16 and zeros [n, groups], and their values; groups [k] are those of inputs."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    num_groups = int(groups.max()) + 1
    scales = (torch.rand(len(weight), num_groups) * weight.std() * 0.3 + 0.02).half()
    zeros = torch.full(scales.shape, 8)
    if asymmetric:
        zeros = torch.randint(1, 16, scales.shape)
    codes = ((weight / scales[:, groups]).round() + zeros[:, groups]).clamp(0, 15).to(torch.int64)
    return codes, scales, zeros, (codes - zeros[:, groups]) * scales[:, groups].float()


def awq_tensors(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": pack(codes.t(), AWQ_ORDER),
        "qzeros": pack(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }


def gptq_tensors(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, version: int
) -> dict[str, Tensor]:
    return {
        "qweight": pack(codes).t().contiguous(),
        "qzeros": pack((zeros.t() - int(version == 1)) & 15),
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def packed_tensors(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None
) -> dict[str, Tensor]:
    """Tensors of compressed-tensors' pack-quantized; sizes are rounded up to whole int32."""
    found = {
        "weight_packed": pack(padded(codes)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        found["weight_zero_point"] = pack(padded(zeros.t())).t().contiguous()
    if groups is not None:
        found["weight_g_idx"] = groups.to(torch.int32)
    return found


def padded(codes: Tensor) -> Tensor:
    return nn.functional.pad(codes, (0, -codes.shape[1] % 8))


def save(
    model: nn.Module, folder: Path, tensors: dict[str, dict[str, Tensor]], config: dict[str, Any]
) -> None:
    """Save a model whose modules, by name, are stored in other tensors, with a quantization_config."""
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.removesuffix(".weight") not in tensors
    }
    for module, parts in tensors.items():
        state |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
    model.save_pretrained(folder, state_dict=state)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
