"""Packs integers as AutoAWQ, GPTQModel and compressed-tensors do, of 4 or 8 bits, and writes checkpoints.

`compare` loads one and holds it against transformers' model with the dequantized weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.loader import load, outline
from models.memory import num_parameters
from tests.models.families import BASE, prompt, randomised
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits
from tests.models.test_parity import TOLERANCE

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {**BASE, "vocab_size": 136, "hidden_size": 192, "intermediate_size": 256, "head_dim": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}


def linears(model, head=False):
    """The linears that tools quantize, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (".layers." in name or head)
    }


def pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Codes [n, m * 32 / bits] as int32 [n, m]: the bits `bits` * i of each are those of code order[i]."""
    count = 32 // bits
    packed = torch.zeros(len(codes), codes.shape[1] // count, dtype=torch.int64)
    for index, place in enumerate(order[:count]):
        packed |= codes[:, place::count].long() << bits * index
    return packed.to(torch.uint32).view(torch.int32)


def quantized(weight: Tensor, group_size: int, asymmetric: bool, groups: Tensor | None = None, bits: int = 4):
    """Codes [n, k], scales fp16 and zeros [n, groups], and their values; groups [k] are those of inputs."""
    size = weight.shape[1] if group_size == -1 else group_size
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    num_groups = int(groups.max()) + 1
    scales = ((torch.rand(len(weight), num_groups) * weight.std() * 0.3 + 0.02) * 2.0 ** (4 - bits)).half()
    zeros = torch.full(scales.shape, 1 << bits - 1)
    if asymmetric:
        zeros = torch.randint(1, 1 << bits, scales.shape)
    codes = (weight / scales[:, groups]).round() + zeros[:, groups]
    codes = codes.clamp(0, (1 << bits) - 1).to(torch.int64)
    return codes, scales, zeros, (codes - zeros[:, groups]) * scales[:, groups].float()


def awq_tensors(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": pack(codes.t(), AWQ_ORDER),
        "qzeros": pack(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }


def gptq_tensors(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, version: int, bits: int = 4
) -> dict[str, Tensor]:
    return {
        "qweight": pack(codes, bits=bits).t().contiguous(),
        "qzeros": pack((zeros.t() - int(version == 1)) & (1 << bits) - 1, bits=bits),
        "scales": scales.t().contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def packed_tensors(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, bits: int = 4
) -> dict[str, Tensor]:
    """Tensors of compressed-tensors' pack-quantized; sizes are rounded up to whole int32."""
    found = {
        "weight_packed": pack(padded(codes, bits), bits=bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        found["weight_zero_point"] = pack(padded(zeros.t(), bits), bits=bits).t().contiguous()
    if groups is not None:
        found["weight_g_idx"] = groups.to(torch.int32)
    return found


def padded(codes: Tensor, bits: int) -> Tensor:
    return nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))


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


def compare(model, folder):
    """Compare the logits of a checkpoint with those of the dequantized model; return the decoder."""
    decoder = load(files_of(folder), torch.float32, CPU)
    outline(files_of(folder), torch.float32)
    assert num_parameters(decoder) == sum(parameter.numel() for parameter in model.parameters())
    ids = prompt(40)
    found, expected = forward_logits(decoder, ids, [17, 1, 22]), transformers_logits(model, ids)
    worst = (found - expected).abs().max().item() / expected.abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst:.1e} of the largest"
    return decoder


def llama(**changes):
    torch.manual_seed(0)
    return randomised(LlamaForCausalLM(LlamaConfig(**SIZES | changes))).eval()
