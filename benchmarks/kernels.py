"""Times of single ops against what their bytes and FLOPs allow: one row per op and shape.

    python -m benchmarks.kernels [--only decode] [--tune] [--json FILE]

On a CUDA device the shapes are those of an 8B and a 1B Llama; copy bandwidth and matmul rate are measured in
the same run, and "floor" is the share of the time that they would need. Every call starts with a cold L2
cache, as in a model, where the layers' weights pass through it. Without a GPU tiny shapes show that all runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kernels.act_mul import gelu_mul, silu_mul
from kernels.attention_batch import AttentionBatch
from kernels.decode_attention import Launch, decode_attention_triton
from kernels.dispatch import HAS_TRITON
from kernels.layer_norm import layer_norm
from kernels.logprobs import top_logprobs
from kernels.paged_attention import paged_attention
from kernels.penalties import apply_penalties
from kernels.prefill_attention import TileShape, prefill_attention_triton
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.sampling import sample


@dataclass
class Case:
    """One op at one shape: what to call, and the bytes and FLOPs that it cannot do without."""

    op: str
    shape: str
    call: Callable[[], object]
    num_bytes: float
    flops: float = 0.0


@dataclass
class Result:
    """`floor_share` is the time that bytes and FLOPs need at the ceilings, over the measured time."""

    op: str
    shape: str
    microseconds: float
    gb_per_second: float
    tflops: float
    floor_share: float


@dataclass(frozen=True)
class Heads:
    """Attention shape of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Heads("8B", 32, 8, 128)
LLAMA_1B = Heads("1B", 32, 8, 64)


class Bench:
    """The device, its ceilings, and how a call is timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        # Larger than any L2: writing it leaves nothing of the inputs there.
        self._flush = torch.empty(256 << 20 if self.cuda else 1, dtype=torch.int8, device=device)
        size = 1 << 29 if self.cuda else 1 << 22
        source = self.randn(size // self.dtype.itemsize)
        target = torch.empty_like(source)
        self.bytes_per_second = 2 * size / self.seconds(lambda: target.copy_(source))
        n = 8192 if self.cuda else 256
        a, b = self.randn(n, n), self.randn(n, n)
        self.flops_per_second = 2 * n**3 / self.seconds(lambda: a @ b)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def seconds(self, call: Callable[[], object], repeat: int = 30) -> float:
        """Median time of a call on the device. The flush before it also hides the launch from the clock."""
        for _ in range(3):
            call()
        if not self.cuda:
            times = []
            for _ in range(3):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return statistics.median(times)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
        for start_event, end_event in events:
            self._flush.zero_()
            start_event.record()
            call()
            end_event.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3

    def result(self, case: Case) -> Result:
        seconds = self.seconds(case.call)
        floor = max(case.num_bytes / self.bytes_per_second, case.flops / self.flops_per_second)
        return Result(
            op=case.op,
            shape=case.shape,
            microseconds=seconds * 1e6,
            gb_per_second=case.num_bytes / seconds / 1e9,
            tflops=case.flops / seconds / 1e12,
            floor_share=floor / seconds,
        )


def elementwise(bench: Bench) -> Iterator[Case]:
    hidden, intermediate = (4096, 14336) if bench.cuda else (64, 96)
    item = bench.dtype.itemsize
    for tokens in (1, 64, 256, 8192) if bench.cuda else (1, 4):
        x, residual, weight = bench.randn(tokens, hidden), bench.randn(tokens, hidden), bench.randn(hidden)
        gate_up = bench.randn(tokens, 2 * intermediate)
        size = tokens * hidden * item
        shape = f"{tokens} x {hidden}"
        yield Case("rms_norm", shape, lambda x=x, w=weight: rms_norm(x, w, 1e-5), 2 * size)
        yield Case(
            "add_rms_norm",
            shape,
            lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-5),
            4 * size,
        )
        yield Case("layer_norm", shape, lambda x=x, w=weight: layer_norm(x, w, w, 1e-5), 2 * size)
        size = 3 * tokens * intermediate * item
        shape = f"{tokens} x {intermediate}"
        yield Case("silu_mul", shape, lambda g=gate_up: silu_mul(g), size)
        yield Case("gelu_mul", shape, lambda g=gate_up: gelu_mul(g), size)


def rope(bench: Bench) -> Iterator[Case]:
    for heads in (LLAMA_8B, LLAMA_1B):
        for tokens in (1, 64, 256, 8192) if bench.cuda else (1, 4):
            sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
            q, k, v = bench.randn(tokens, sum(sizes), heads.head_dim).split(sizes, 1)
            angles = torch.rand(tokens, 2, heads.head_dim // 2, device=bench.device)
            caches = [bench.randn(tokens // 16 + 1, 16, heads.num_kv_heads, heads.head_dim) for _ in range(2)]
            slots = torch.randperm(tokens, device=bench.device)
            per_token = (2 * heads.num_heads + 4 * heads.num_kv_heads) * heads.head_dim * bench.dtype.itemsize
            yield Case(
                "rope_kv_write",
                f"{heads.name}, {tokens} tokens",
                lambda args=(q, k, v, angles, *caches, slots): rope_kv_write(*args),
                tokens * (per_token + heads.head_dim * 4),
            )


def attention_inputs(
    bench: Bench, heads: Heads, rows: list[tuple[int, int]], page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Make a step of rows (query_len, context_len) on scattered pages."""
    pages = [-(-length // page_size) for _, length in rows]
    shape = (sum(pages), page_size, heads.num_kv_heads, heads.head_dim)
    permutation = torch.randperm(sum(pages), dtype=torch.int32, device=bench.device)
    table = torch.zeros(len(rows), max(pages), dtype=torch.int32, device=bench.device)
    for i, some in enumerate(permutation.split(pages)):
        table[i, : len(some)] = some
    query_lens, context_lens = [n for n, _ in rows], [length for _, length in rows]
    num_tokens = sum(query_lens)
    batch = AttentionBatch(
        page_table=table,
        query_start=torch.tensor([0, *query_lens], device=bench.device).cumsum(0).to(torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=bench.device),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=bench.device),
        num_decode_rows=query_lens.count(1),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )
    q = bench.randn(num_tokens, heads.num_heads, heads.head_dim)
    return q, bench.randn(*shape), bench.randn(*shape), batch


def attention_cost(bench: Bench, heads: Heads, rows: list[tuple[int, int]]) -> tuple[float, float]:
    """Return (bytes, FLOPs): every key and value read once, every visible score computed once."""
    kv = sum(length for _, length in rows) * 2 * heads.num_kv_heads * heads.head_dim
    q = sum(n for n, _ in rows) * 2 * heads.num_heads * heads.head_dim
    scores = sum(n * length - n * (n - 1) / 2 for n, length in rows)
    return (kv + q) * bench.dtype.itemsize, 4 * scores * heads.num_heads * heads.head_dim


DECODE = [
    (LLAMA_8B, 16, [(1, 512)]),
    (LLAMA_8B, 16, [(1, 512)] * 16),
    (LLAMA_8B, 16, [(1, 512)] * 64),
    (LLAMA_8B, 1, [(1, 512)] * 64),
    (LLAMA_8B, 64, [(1, 512)] * 64),
    (LLAMA_8B, 16, [(1, 640)] * 256),
    (LLAMA_8B, 16, [(1, 64 + 5 * i) for i in range(256)]),
    (LLAMA_8B, 16, [(1, 8192)]),
    (LLAMA_8B, 16, [(1, 32768)]),
    (LLAMA_8B, 16, [(1, 8192)] * 16),
    (LLAMA_1B, 16, [(1, 512)]),
    (LLAMA_1B, 16, [(1, 512)] * 16),
    (LLAMA_1B, 16, [(1, 512)] * 64),
    (LLAMA_1B, 16, [(1, 640)] * 256),
]
PREFILL = [
    (LLAMA_8B, 16, [(512, 512)]),
    (LLAMA_8B, 16, [(2048, 2048)]),
    (LLAMA_8B, 16, [(8192, 8192)]),
    (LLAMA_8B, 1, [(8192, 8192)]),
    (LLAMA_8B, 64, [(8192, 8192)]),
    (LLAMA_8B, 16, [(512, 512)] * 16),
    (LLAMA_8B, 16, [(2048, 8192)]),
    (LLAMA_8B, 16, [(20, 8192)]),
    (LLAMA_1B, 16, [(2048, 2048)]),
    (LLAMA_1B, 16, [(8192, 8192)]),
]
TINY = [(Heads("tiny", 4, 2, 16), 16, [(1, 20), (1, 5)])], [(Heads("tiny", 4, 2, 16), 16, [(20, 33)])]


def describe(heads: Heads, page_size: int, rows: list[tuple[int, int]]) -> str:
    lengths = sorted({length for _, length in rows})
    context = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}-{lengths[-1]}"
    queries = f"{rows[0][0]} of " if rows[0][0] > 1 else ""
    return f"{heads.name}, {len(rows)} x {queries}{context}, page {page_size}"


def attention(bench: Bench, which: str) -> Iterator[Case]:
    decode, prefill = (DECODE, PREFILL) if bench.cuda else TINY
    for heads, page_size, rows in decode if which == "decode" else prefill:
        inputs = attention_inputs(bench, heads, rows, page_size)
        num_bytes, flops = attention_cost(bench, heads, rows)
        scale = heads.head_dim**-0.5
        yield Case(
            which,
            describe(heads, page_size, rows),
            lambda i=inputs, s=scale: paged_attention(*i, scale=s),
            num_bytes,
            flops,
        )


def reference(bench: Bench) -> Iterator[Case]:
    """Torch's own causal attention over contiguous keys, as a yardstick of prefill."""
    for heads in (LLAMA_8B, LLAMA_1B):
        n = 8192 if bench.cuda else 16
        q = bench.randn(1, heads.num_heads, n, heads.head_dim)
        k, v = (bench.randn(1, heads.num_kv_heads, n, heads.head_dim) for _ in range(2))
        yield Case(
            "torch sdpa",
            f"{heads.name}, {n}, contiguous",
            lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            *attention_cost(bench, heads, [(n, n)]),
        )


def sampling(bench: Bench) -> Iterator[Case]:
    vocab = 128_256 if bench.cuda else 1000
    for num_rows in (1, 16, 64, 256) if bench.cuda else (2,):
        logits = torch.randn(num_rows, vocab, device=bench.device) * 3
        size = num_rows * vocab * 4

        def rows(value: float, dtype: torch.dtype, n: int = num_rows) -> torch.Tensor:
            return torch.full((n,), value, dtype=dtype, device=bench.device)

        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, 0, 1.0),
            ("unfiltered", 0.8, 0, 1.0),
            ("top-k 50, top-p 0.95", 0.8, 50, 0.95),
            ("top-p 0.95", 0.8, 0, 0.95),
        ):
            args = (
                logits,
                rows(temperature, torch.float32),
                rows(top_k, torch.int32),
                rows(top_p, torch.float32),
                rows(0.0, torch.float32),
                rows(1, torch.int64),
                torch.arange(num_rows, device=bench.device),
            )
            yield Case("sample", f"{num_rows} x {vocab}, {name}", lambda a=args: sample(*a), size)
        counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=bench.device)
        some = rows(0.5, torch.float32)
        slots = torch.arange(num_rows, device=bench.device)
        args = (logits, counts, counts > 0, slots, some, some, some + 0.6)
        yield Case(
            "apply_penalties", f"{num_rows} x {vocab}", lambda a=args: apply_penalties(*a), 3.25 * size
        )
        yield Case(
            "top_logprobs",
            f"{num_rows} x {vocab}, 20",
            lambda x=logits, s=slots: top_logprobs(x, s, 20),
            size,
        )


GROUPS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "elementwise": elementwise,
    "rope": rope,
    "decode": lambda bench: attention(bench, "decode"),
    "prefill": lambda bench: attention(bench, "prefill"),
    "reference": reference,
    "sampling": sampling,
}


def tune_prefill(bench: Bench) -> Iterator[Case]:
    """Every cut of the prefill kernel that is worth a try."""
    rows = [(8192, 8192)]
    for heads in (LLAMA_8B, LLAMA_1B):
        inputs = attention_inputs(bench, heads, rows, 16)
        out = torch.empty_like(inputs[0])
        for block_m, block_n, warps in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4), (64, 128, 4)):
            for stages in (2, 3, 4):
                cut = TileShape(block_m, block_n, warps, stages)
                yield Case(
                    "prefill",
                    f"{describe(heads, 16, rows)}: {tuple(cut)}",
                    lambda i=inputs, o=out, s=heads.head_dim**-0.5, c=cut: prefill_attention_triton(
                        *i, o, scale=s, shape=c
                    ),
                    *attention_cost(bench, heads, rows),
                )


def tune_decode(bench: Bench) -> Iterator[Case]:
    """Every cut of the decode kernel that is worth a try."""
    for heads in (LLAMA_8B, LLAMA_1B):
        for rows in ([(1, 512)], [(1, 512)] * 64, [(1, 640)] * 256, [(1, 32768)]):
            inputs = attention_inputs(bench, heads, rows, 16)
            out = torch.empty_like(inputs[0])
            for block_n, warps in ((32, 2), (32, 4), (64, 2), (64, 4), (128, 4)):
                for per_sm, stages in ((2, 3), (2, 5), (4, 3), (4, 5), (8, 3)):
                    launch = Launch(block_n, per_sm, warps, stages)
                    yield Case(
                        "decode",
                        f"{describe(heads, 16, rows)}: {tuple(launch)}",
                        lambda i=inputs, o=out, s=heads.head_dim**-0.5, c=launch: decode_attention_triton(
                            *i, o, scale=s, launch=c
                        ),
                        *attention_cost(bench, heads, rows),
                    )


TUNABLE: dict[str, Callable[[Bench], Iterator[Case]]] = {"prefill": tune_prefill, "decode": tune_decode}


def run(device: torch.device, only: str | None = None, tune: bool = False) -> dict[str, object]:
    """Time all ops, or one group of them, and return the ceilings and a row for each."""
    with torch.inference_mode():
        bench = Bench(device)
        sources = [s for name, s in (TUNABLE if tune else GROUPS).items() if only in (None, name)]
        results = []
        for source in sources:
            for case in source(bench):
                try:
                    results.append(bench.result(case))
                except Exception as error:
                    if not tune:
                        raise
                    # A cut that asks for more than a multiprocessor has.
                    print(f"{case.shape}: {str(error).splitlines()[0]}")
    return {
        "device": torch.cuda.get_device_name(device) if bench.cuda else "cpu",
        "torch": torch.__version__,
        "copy_gb_per_second": bench.bytes_per_second / 1e9,
        "matmul_tflops": bench.flops_per_second / 1e12,
        "results": [asdict(result) for result in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, help="one group of ops")
    parser.add_argument("--tune", action="store_true", help="try the cuts of the attention kernels (CUDA)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.tune and not (HAS_TRITON and device.type == "cuda"):
        parser.error("--tune needs a CUDA device and triton")
    report = run(device, arguments.only, arguments.tune)
    table = Table(
        title=f"{report['device']}: copy {report['copy_gb_per_second']:.0f} GB/s, "
        f"matmul {report['matmul_tflops']:.1f} TFLOP/s"
    )
    for column in ("op", "shape", "us", "GB/s", "TFLOP/s", "floor"):
        table.add_column(column, justify="left" if column in ("op", "shape") else "right", no_wrap=True)
    for row in report["results"]:
        table.add_row(
            row["op"],
            row["shape"],
            f"{row['microseconds']:.1f}",
            f"{row['gb_per_second']:.0f}",
            f"{row['tflops']:.1f}",
            f"{row['floor_share']:.0%}",
        )
    Console(width=140).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
