"""The engine in this process against transformers' `generate`, and against the matmuls of a decode step.

    python -m benchmarks.engine_cpu [--dtype float32,bfloat16] [--batch 1,16] [--prompt 64,448] [--rounds 3]

Each round runs all contenders one after the other, since CPU speed drifts from minute to minute; a ratio is
the median of the rounds' ratios. "floor" is the chain of a step's weight products through `F.linear`,
"packed" the same through `kernels.linear`; both with every layer's own weights, as memory sees them in a real
step.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common import StepRecorder, generate, parser, prompts, show
from engine import Engine
from engine.config import EngineConfig
from kernels.kv_layer import KVLayer
from kernels.linear import linear, pack_weight
from kernels.paged_attention import AttentionBatch, AttentionOptions, paged_attention
from models.catalog import ModelFiles, locate
from models.loader import read_spec
from models.spec import DecoderSpec

OUTPUT_TOKENS = 128
PAGE_SIZE = 16


def main() -> None:
    """Run every combination and print one table."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    files = locate(EngineConfig().model)
    rows = [
        row
        for dtype in arguments.dtype
        for row in run_dtype(
            dtype, files, arguments.batch, arguments.prompt, arguments.rounds, arguments.threads
        )
    ]
    show(f"{files.name}, {OUTPUT_TOKENS} new tokens, {arguments.threads} threads", rows, arguments.json)


def parse() -> argparse.Namespace:
    """The command's flags."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--dtype", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    flags.add_argument("--batch", type=numbers, default=[1, 16])
    flags.add_argument("--prompt", type=numbers, default=[64, 448], help="prompt tokens")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--threads", type=int, default=2)
    return flags.parse_args()


def numbers(text: str) -> list[int]:
    """`1,16` as a list."""
    return [int(part) for part in text.split(",")]


def run_dtype(
    dtype_name: str, files: ModelFiles, batches: list[int], lengths: list[int], rounds: int, threads: int
) -> list[dict[str, Any]]:
    """All rows of one dtype."""
    dtype = getattr(torch, dtype_name)
    spec = read_spec(files)
    recorder = StepRecorder()
    config = EngineConfig(
        dtype=dtype_name,
        device="cpu",
        kv_tokens=16_384,
        page_size=PAGE_SIZE,
        threads=threads,
        prefix_cache=False,
    )
    peer = make_peer(spec, dtype)
    rows = []
    with torch.inference_mode(), asyncio.Runner() as runner:
        engine = runner.run(Engine.start(config, observer=recorder))
        for batch in batches:
            floor, packed = floor_chains(spec, batch, dtype)
            for length in lengths:
                attention = attention_chain(spec, batch, length + OUTPUT_TOKENS // 2, dtype)
                row = {"dtype": dtype_name, "batch": batch, "context": f"{length}–{length + OUTPUT_TOKENS}"}
                measured = []
                for round_ in range(rounds + 1):  # the first one warms up
                    recorder.steps.clear()
                    ids = prompts(batch, length, seed=round_)
                    measured.append(
                        {
                            "ours": runner.run(generate(engine, ids, OUTPUT_TOKENS)),
                            "step": recorder.decode_step_seconds(batch),
                            "peer": run_peer(peer, ids),
                            "floor": median_seconds(floor),
                            "packed": median_seconds(packed),
                            "attention": median_seconds(attention),
                        }
                    )
                rows.append(row | summary(measured[1:], batch))
        runner.run(engine.stop())
    return rows


def summary(measured: list[dict[str, float]], batch: int) -> dict[str, float]:
    """Medians over the rounds; ratios are taken inside a round."""

    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(value(one) for one in measured)

    tokens = batch * OUTPUT_TOKENS
    return {
        "tokens/s": median(lambda one: tokens / one["ours"]),
        "transformers": median(lambda one: tokens / one["peer"]),
        "× transformers": median(lambda one: one["peer"] / one["ours"]),
        "step ms": median(lambda one: one["step"] * 1e3),
        "floor ms": median(lambda one: one["floor"] * 1e3),
        "packed ms": median(lambda one: one["packed"] * 1e3),
        "% of floor": median(lambda one: 100 * one["floor"] / one["step"]),
        "% of packed": median(lambda one: 100 * one["packed"] / one["step"]),
        "attention %": median(lambda one: 100 * one["attention"] / one["step"]),
    }


def make_peer(spec: DecoderSpec, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model of the same shape. Its weights are random: speed does not depend on them."""
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tie_embeddings,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def run_peer(model: PreTrainedModel, batch: list[tuple[int, ...]]) -> float:
    """Seconds transformers takes for the same batch."""
    input_ids = torch.tensor(batch)
    config = GenerationConfig(
        max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    start = time.perf_counter()
    output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
    elapsed = time.perf_counter() - start
    assert output.shape[1] == input_ids.shape[1] + OUTPUT_TOKENS
    return elapsed


def floor_chains(
    spec: DecoderSpec, batch: int, dtype: torch.dtype
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The weight products of one decode step, through F.linear and through kernels.linear."""
    shapes = [shape for layer in range(spec.num_layers) for shape in layer_shapes(spec, layer)]
    shapes.append((spec.vocab_size, spec.hidden_size))
    weights = [torch.randn(shape, dtype=dtype) for shape in shapes]
    packed = [pack_weight(weight) for weight in weights]
    inputs = {columns: torch.randn(batch, columns, dtype=dtype) for _, columns in shapes}

    def plain() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def through_kernels() -> None:
        for (_, columns), weight in zip(shapes, packed, strict=True):
            linear(inputs[columns], weight)

    return plain, through_kernels


def layer_shapes(spec: DecoderSpec, layer: int) -> list[tuple[int, int]]:
    """[out, in] of a layer's products: q/k/v fused, output, gate/up fused, down."""
    hidden, inner = spec.hidden_size, spec.layers[layer].mlp.intermediate_size
    heads, kv_heads, size = spec.layers[layer].attention.num_heads, spec.num_kv_heads, spec.head_dim
    return [
        ((heads + 2 * kv_heads) * size, hidden),
        (hidden, heads * size),
        (2 * inner, hidden),
        (hidden, inner),
    ]


def attention_chain(spec: DecoderSpec, batch: int, context: int, dtype: torch.dtype) -> Callable[[], None]:
    """Attention of one decode step, over all layers."""
    pages = -(-context // PAGE_SIZE)
    page_table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    cache_shape = (batch * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    caches = [
        KVLayer(torch.randn(cache_shape, dtype=dtype), torch.randn(cache_shape, dtype=dtype))
        for _ in spec.layers
    ]
    q = torch.randn(batch, spec.layers[0].attention.num_heads, spec.head_dim, dtype=dtype)

    def attend() -> None:
        attention = AttentionBatch(
            page_table=page_table,
            query_start=torch.arange(batch + 1, dtype=torch.int32),
            context_lens=torch.full((batch,), context, dtype=torch.int32),
            slot_mapping=page_table[:, -1].to(torch.int64) * PAGE_SIZE,
            num_decode_rows=batch,
            query_lens=[1] * batch,
            context_lens_host=[context] * batch,
        )
        for kv in caches:
            paged_attention(q, kv, attention, AttentionOptions(spec.head_dim**-0.5))

    return attend


def median_seconds(work: Callable[[], None], times: int = 7) -> float:
    """Median time of `work`, after one call to warm up."""
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
