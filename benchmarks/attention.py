"""Compares attention with torch's own, and tunes its launch parameters. `bench kernel` times every op.

    python -m benchmarks.attention [--tune decode|prefill] [--json FILE]

Torch's sdpa and varlen attention read contiguous keys and values: the speed of a vendor's kernel. With --tune
the kernels run with every promising choice of launch parameters.
"""

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks.common import show
from engine.bench.attention_cases import (
    LLAMA_1B,
    LLAMA_8B,
    TINY,
    AttentionCase,
    Heads,
    attention_calls,
    attention_inputs,
)
from engine.bench.ops import OpCase, time_op
from engine.bench.probe import Probe
from kernels.decode_attention import Launch, decode_attention_triton
from kernels.dispatch import HAS_TRITON
from kernels.prefill_attention import TileShape, prefill_attention_triton

DECODE_BLOCKS = ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4))  # (keys per tile, warps)
DECODE_PROGRAMS = ((2, 3), (2, 5), (4, 3), (4, 5), (8, 2), (8, 3), (16, 2))  # (per multiprocessor, stages)
DECODE_ROWS = ([(1, 512)], [(1, 512)] * 64, [(1, 640)] * 256, [(1, 32768)])
PREFILL_TILES = ((256, 64, 8), (128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 128, 4))
PREFILL_STAGES = (2, 3, 4)
PREFILL_ROWS = [(8192, 8192)]


def references(probe: Probe) -> Iterator[OpCase]:
    """Yield our attention on pages, then torch's on contiguous memory."""
    lengths, models = ((2048, 8192), (LLAMA_8B, LLAMA_1B)) if probe.cuda else ((16,), (TINY,))
    cases = [AttentionCase(heads, 16, [(n, n)]) for heads in models for n in lengths]
    for case, call in attention_calls(probe, cases):
        cost = case.cost(probe.dtype)
        ((n, _),) = case.rows
        yield OpCase("ours", str(case), call, *cost)
        yield OpCase("torch sdpa", f"{case.heads.name}, {n}, contiguous", sdpa(probe, case.heads, n), *cost)
        if (varlen := varlen_attention(probe, case.heads, n)) is not None:
            yield OpCase("torch varlen", f"{case.heads.name}, {n}, contiguous", varlen, *cost)


def sdpa(probe: Probe, heads: Heads, n: int) -> Callable[[], object]:
    """Torch's causal attention of one sequence."""
    q = probe.randn(1, heads.num_heads, n, heads.head_dim)
    k, v = (probe.randn(1, heads.num_kv_heads, n, heads.head_dim) for _ in range(2))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def varlen_attention(probe: Probe, heads: Heads, n: int) -> Callable[[], object] | None:
    """FlashAttention as torch ships it, for CUDA; its arguments differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not probe.cuda or "window_size" not in known:
        return None
    options = {"enable_gqa": True} if "enable_gqa" in known else {}
    q = probe.randn(n, heads.num_heads, heads.head_dim)
    k, v = (probe.randn(n, heads.num_kv_heads, heads.head_dim) for _ in range(2))
    starts = torch.tensor([0, n], dtype=torch.int32, device=probe.device)
    return lambda: varlen_attn(q, k, v, starts, starts, n, n, window_size=(-1, 0), **options)


def tune_prefill(probe: Probe) -> Iterator[OpCase]:
    """Yield the prefill kernel with each choice of launch parameters."""
    for heads in (LLAMA_8B, LLAMA_1B):
        case = AttentionCase(heads, 16, PREFILL_ROWS)
        inputs = attention_inputs(probe, case)
        out = torch.empty_like(inputs.q)
        for tile, stages in product(PREFILL_TILES, PREFILL_STAGES):
            cut = TileShape(*tile, stages)
            yield OpCase(
                "prefill_attention",
                f"{case}: {tuple(cut)}",
                partial(prefill_attention_triton, *inputs[:3], out, inputs.options, shape=cut),
                *case.cost(probe.dtype),
            )


def tune_decode(probe: Probe) -> Iterator[OpCase]:
    """Yield the decode kernel with each choice of launch parameters."""
    for heads, rows in product((LLAMA_8B, LLAMA_1B), DECODE_ROWS):
        case = AttentionCase(heads, 16, rows)
        inputs = attention_inputs(probe, case)
        out = torch.empty_like(inputs.q)
        for (block_n, warps), (per_sm, stages) in product(DECODE_BLOCKS, DECODE_PROGRAMS):
            launch = Launch(block_n, per_sm, warps, stages)
            yield OpCase(
                "decode_attention",
                f"{case}: {tuple(launch)}",
                partial(decode_attention_triton, *inputs[:3], out, inputs.options, launch=launch),
                *case.cost(probe.dtype),
            )


TUNABLE = {"prefill": tune_prefill, "decode": tune_decode}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", choices=TUNABLE, help="try launch parameters of this kernel (CUDA)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.tune and not (HAS_TRITON and device.type == "cuda"):
        parser.error("--tune needs a CUDA device and triton")
    probe = Probe(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows = []
    with torch.inference_mode():
        ceilings = probe.ceilings()
        print(json.dumps(asdict(ceilings)))
        for case in TUNABLE[arguments.tune](probe) if arguments.tune else references(probe):
            try:
                rows.append(asdict(time_op(probe, ceilings, case)))
            except Exception as error:  # parameters that need more than a multiprocessor has
                if not arguments.tune:
                    raise
                print(f"{case.shape}: {str(error).splitlines()[0]}")
    show("attention", rows, arguments.json)


if __name__ == "__main__":
    main()
