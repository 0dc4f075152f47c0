"""Times single ops and compares them with the time their bytes and FLOPs need: one row per op and shape.

On a CUDA device the shapes are those of an 8B and a 1B Llama; copy bandwidth and matmul rate are measured in
the same run. Without a GPU tiny shapes only show that everything runs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from engine.bench.attention_cases import (
    DECODE,
    LLAMA_1B,
    LLAMA_8B,
    PREFILL,
    TINY_DECODE,
    TINY_PREFILL,
    attention_calls,
)
from engine.bench.probe import Ceilings, Probe
from engine.config import EngineConfig
from engine.device.devices import choose_device
from kernels.act_mul import gelu_mul, gelu_tanh_mul, silu_mul
from kernels.block_linear import block_linear
from kernels.eight_bit_linear import eight_bit_linear
from kernels.expert_routing import RouterOptions, group_by_expert
from kernels.grouped_linear import GatedActivation, grouped_linear
from kernels.grouped_linear_sum import grouped_linear_sum
from kernels.kv_layer import KVLayer
from kernels.layer_norm import add_layer_norm, layer_norm
from kernels.logits import scaled_logits
from kernels.logprobs import top_logprobs
from kernels.penalties import apply_penalties
from kernels.quantize_rows import quantize_rows
from kernels.quantized_linear import quantized_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.router import route
from kernels.sampling import sample
from kernels.scaled_linear import scaled_linear
from kernels.token_mask import apply_token_mask


@dataclass(frozen=True)
class OpCase:
    """One op at one shape: the call, and the bytes and FLOPs that it needs.

    Products of 8 bits are counted as half as many FLOPs: the matrix unit has twice the rate for them.
    """

    op: str
    shape: str
    call: Callable[[], object]
    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """The time of an op. `floor_share`: time its bytes and FLOPs need at the ceilings / measured time."""

    op: str
    shape: str
    microseconds: float
    gb_per_second: float
    tflops: float
    floor_share: float


def measure_ops(
    config: EngineConfig, ops: Iterable[str], on_row: Callable[[OpTime], None]
) -> tuple[Ceilings, list[OpTime]]:
    """Time the named ops (of OP_NAMES) on the device of `config`; `on_row` gets each row when it is measured.

    Raises ValueError, naming the setting, if there is no such device.
    """
    device = choose_device(config)
    probe = Probe(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    chosen = set(ops)
    with torch.inference_mode():
        ceilings = probe.ceilings()
        rows = []
        for names, cases in SOURCES.items():
            if chosen.isdisjoint(names):
                continue
            for case in cases(probe):
                if case.op in chosen:
                    rows.append(time_op(probe, ceilings, case))
                    on_row(rows[-1])
    return ceilings, rows


def time_op(probe: Probe, ceilings: Ceilings, case: OpCase) -> OpTime:
    """Time one case on the device."""
    seconds = probe.device_seconds(case.call)
    floor = max(case.num_bytes / ceilings.bytes_per_second, case.flops / ceilings.flops_per_second)
    return OpTime(
        op=case.op,
        shape=case.shape,
        microseconds=seconds * 1e6,
        gb_per_second=case.num_bytes / seconds / 1e9,
        tflops=case.flops / seconds / 1e12,
        floor_share=floor / seconds,
    )


def elementwise(probe: Probe) -> Iterator[OpCase]:
    """Yield norms and gates."""
    hidden, intermediate = (4096, 14336) if probe.cuda else (64, 96)
    item = probe.dtype.itemsize
    for tokens in (1, 64, 256, 8192) if probe.cuda else (1, 4):
        x, residual, weight = probe.randn(tokens, hidden), probe.randn(tokens, hidden), probe.randn(hidden)
        gate_up = probe.randn(tokens, 2 * intermediate)
        size = tokens * hidden * item
        shape = f"{tokens} x {hidden}"
        yield OpCase("rms_norm", shape, partial(rms_norm, x, weight, 1e-5), 2 * size)
        yield OpCase("add_rms_norm", shape, partial(add_rms_norm, x, residual, weight, 1e-5), 4 * size)
        yield OpCase("layer_norm", shape, partial(layer_norm, x, weight, None, 1e-5), 2 * size)
        add = partial(add_layer_norm, x, residual, weight, None, 1e-5)
        yield OpCase("add_layer_norm", shape, add, 4 * size)
        size = 3 * tokens * intermediate * item
        shape = f"{tokens} x {intermediate}"
        yield OpCase("silu_mul", shape, partial(silu_mul, gate_up), size)
        yield OpCase("gelu_mul", shape, partial(gelu_mul, gate_up), size)
        yield OpCase("gelu_tanh_mul", shape, partial(gelu_tanh_mul, gate_up), size)


def products(probe: Probe) -> Iterator[OpCase]:
    """Yield matrix products with weights of 8 bits, those of the MLP of an 8B model, and what goes before."""
    for n, k in ((28672, 4096), (4096, 14336)) if probe.cuda else ((96, 64),):
        for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
            weight, scale = quantize_rows(torch.randn(n, k, device=probe.device), dtype)
            for tokens in (1, 16, 64, 256, 8192) if probe.cuda else (1, 4):
                x, item = probe.randn(tokens, k), probe.dtype.itemsize
                values, scales = quantize_rows(x, dtype)
                flops, shape = 2 * tokens * n * k, f"{tokens} x {k} x {n}, {name}"
                num_bytes = n * k + tokens * (n + k) * item
                call = partial(eight_bit_linear, x, weight, scale)
                yield OpCase("eight_bit_linear", shape, call, num_bytes, flops)
                call = partial(quantized_linear, x, weight, scale)
                yield OpCase("quantized_linear", shape, call, num_bytes, flops / 2)
                if name == "fp8":
                    blocks = torch.rand(n // 32, -(-k // 128), device=probe.device)
                    call = partial(block_linear, x, weight, blocks)
                    yield OpCase("block_linear", shape, call, num_bytes, flops / 2)
                call = partial(scaled_linear, values, scales, weight, scale, None, x.dtype)
                num_bytes = n * k + tokens * (n * item + k)
                yield OpCase("scaled_linear", shape, call, num_bytes, flops / 2)
                quantize, num_bytes = partial(quantize_rows, x, dtype), tokens * k * (item + 1)
                yield OpCase("quantize_rows", f"{tokens} x {k}, {name}", quantize, num_bytes)


def experts(probe: Probe) -> Iterator[OpCase]:
    """Yield the ops of a layer with experts: those of Qwen3-30B-A3B. Bytes count the experts that are hit."""
    num_experts, top_k, hidden, size = (128, 8, 2048, 768) if probe.cuda else (8, 2, 48, 24)
    item, options = probe.dtype.itemsize, RouterOptions(top_k, normalize=True)
    router = probe.randn(num_experts, hidden)
    gate_up, down = probe.randn(num_experts, 2 * size, hidden), probe.randn(num_experts, hidden, size)
    for tokens in (1, 16, 64, 256, 8192) if probe.cuda else (1, 4):
        x, inner, shape = probe.randn(tokens, hidden), probe.randn(tokens * top_k, size), f"{tokens} tokens"
        ids, weights, _ = route(x, router, num_experts, options)
        groups = group_by_expert(ids, num_experts)
        hit, pairs = len(ids.unique()), tokens * top_k
        io = (tokens * hidden + pairs * size) * item
        yield OpCase(
            "route",
            shape,
            partial(route, x, router, num_experts, options),
            (num_experts + tokens) * hidden * item,
        )
        yield OpCase("group_by_expert", shape, partial(group_by_expert, ids, num_experts), 8 * pairs)
        call = partial(grouped_linear, x, gate_up, groups, activation=GatedActivation("silu"))
        flops = 2 * pairs * hidden * size
        yield OpCase("grouped_linear", shape, call, hit * 2 * size * hidden * item + io, 2 * flops)
        call = partial(grouped_linear_sum, inner, down, groups, weights)
        yield OpCase("grouped_linear_sum", shape, call, hit * size * hidden * item + io, flops)


def rope(probe: Probe) -> Iterator[OpCase]:
    """Yield the rotation and the write of keys and values into pages."""
    for heads in (LLAMA_8B, LLAMA_1B):
        for tokens in (1, 64, 256, 8192) if probe.cuda else (1, 4):
            sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            q, k, v = probe.randn(tokens, sum(sizes), heads.head_dim).split(sizes, 1)
            angles = torch.rand(tokens, 2, heads.head_dim // 2, device=probe.device)
            cache_shape = (tokens // 16 + 1, 16, heads.num_kv_heads, heads.head_dim)
            kv = KVLayer(probe.randn(*cache_shape), probe.randn(*cache_shape))
            slots = torch.randperm(tokens, device=probe.device)
            per_token = (2 * heads.num_heads + 4 * heads.num_kv_heads) * heads.head_dim * probe.dtype.itemsize
            yield OpCase(
                "rope_kv_write",
                f"{heads.name}, {tokens} tokens",
                partial(rope_kv_write, q, k, v, angles, kv, slots),
                tokens * (per_token + heads.head_dim * 4),
            )


def decode(probe: Probe) -> Iterator[OpCase]:
    """Yield attention of rows with one query."""
    for case, call in attention_calls(probe, DECODE if probe.cuda else TINY_DECODE):
        yield OpCase("decode_attention", str(case), call, *case.cost(probe.dtype))


def prefill(probe: Probe) -> Iterator[OpCase]:
    """Yield attention of rows with several queries."""
    for case, call in attention_calls(probe, PREFILL if probe.cuda else TINY_PREFILL):
        yield OpCase("prefill_attention", str(case), call, *case.cost(probe.dtype))


def sampling(probe: Probe) -> Iterator[OpCase]:
    """Yield the ops from logits to tokens."""
    vocab = 128_256 if probe.cuda else 1000
    for num_rows in (1, 16, 64, 256) if probe.cuda else (2,):
        logits = torch.randn(num_rows, vocab, device=probe.device) * 3
        size = num_rows * vocab * 4

        def rows(value: float, dtype: torch.dtype, n: int = num_rows) -> torch.Tensor:
            return torch.full((n,), value, dtype=dtype, device=probe.device)

        product, out = logits.to(probe.dtype), torch.empty_like(logits)
        scaled = partial(scaled_logits, product, 0.5, 30.0, out)
        yield OpCase("scaled_logits", f"{num_rows} x {vocab}, soft cap", scaled, size + product.nbytes)
        slots = torch.arange(num_rows, device=probe.device)
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("unfiltered", 0.8, 0, 1.0),
            ("top-k 50, top-p 0.95", 0.8, 50, 0.95),
            ("top-p 0.95", 0.8, 0, 0.95),
        ):
            args = (
                logits,
                slots,
                rows(temperature, torch.float32),
                rows(top_k, torch.int32),
                rows(top_p, torch.float32),
                rows(0.0, torch.float32),
                rows(1, torch.int64),
                slots,  # positions: any will do
            )
            yield OpCase("sample", f"{num_rows} x {vocab}, {name}", partial(sample, *args), size)
        counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=probe.device)
        some = rows(0.5, torch.float32)
        penalties = (logits, counts, counts > 0, slots, some, some, some + 0.6)
        yield OpCase(
            "apply_penalties", f"{num_rows} x {vocab}", partial(apply_penalties, *penalties), 3.25 * size
        )
        masks = torch.full((num_rows, -(-vocab // 32)), -1, dtype=torch.int32, device=probe.device)
        yield OpCase(
            "apply_token_mask",
            f"{num_rows} x {vocab}, all allowed",
            partial(apply_token_mask, logits, masks, slots),
            size / 32,
        )
        yield OpCase(
            "top_logprobs",
            f"{num_rows} x {vocab}, 20",
            partial(top_logprobs, logits, slots, 20),
            size,
        )


SOURCES: dict[tuple[str, ...], Callable[[Probe], Iterator[OpCase]]] = {
    (
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "add_layer_norm",
        "silu_mul",
        "gelu_mul",
        "gelu_tanh_mul",
    ): elementwise,
    ("eight_bit_linear", "quantized_linear", "scaled_linear", "quantize_rows", "block_linear"): products,
    ("route", "group_by_expert", "grouped_linear", "grouped_linear_sum"): experts,
    ("rope_kv_write",): rope,
    ("decode_attention",): decode,
    ("prefill_attention",): prefill,
    ("scaled_logits", "sample", "apply_penalties", "apply_token_mask", "top_logprobs"): sampling,
}
OP_NAMES = tuple(name for names in SOURCES for name in names)
