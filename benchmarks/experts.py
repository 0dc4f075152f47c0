"""Layers with experts beside the time that the bytes of the experts which are hit need.

    python -m benchmarks.experts [--layers N] [--tune] [--json FILE]

The shape is Qwen3-30B-A3B's, by default cut to 24 layers; without a GPU a tiny one only shows that all runs.
"experts" are mixture-of-experts blocks alone, one after the other in one CUDA graph. "step" is a decode step
of the whole model through the runner, 512 tokens of context. The floor is the bytes of what is read, at the
bandwidth of a copy: the hit experts by the routing that was drawn, in a step also all other weights and KV.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import torch

import models.moe
from benchmarks.common import parser, show
from engine.bench.probe import Ceilings, Probe
from engine.bench.steps import NUM_DECODE_STEPS, StepDriver, StepsToMeasure, captured
from engine.config import EngineConfig
from engine.device.devices import choose_device, set_up_thread
from engine.device.runner import ModelRunner
from engine.request import SamplingParams
from kernels.dispatch import HAS_TRITON
from kernels.expert_routing import group_by_expert, group_by_expert_triton
from kernels.grouped_linear import GatedActivation, TileShape, grouped_linear_triton
from kernels.grouped_linear_sum import MatvecShape, grouped_linear_sum_triton
from models.decoder import Decoder
from models.families import qwen3_moe
from models.forward_batch import ForwardBatch
from models.loader import random_decoder
from models.spec import DecoderSpec, MoeSpec

QWEN3_30B_A3B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
}
TINY = {
    **QWEN3_30B_A3B,
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
NO_BATCH = ForwardBatch(torch.zeros(0), torch.zeros(0), ())


class RoutingRecord:
    """Counts the experts that are hit, layer by layer, while it stands in for `group_by_expert`."""

    def __init__(self) -> None:
        self.num_hit = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the experts of what is computed inside, which must not be in a CUDA graph."""

        def recorded(expert_ids: torch.Tensor, num_experts: int) -> Any:
            self.num_hit += len(expert_ids.unique())
            return group_by_expert(expert_ids, num_experts)

        models.moe.group_by_expert = recorded
        try:
            yield
        finally:
            models.moe.group_by_expert = group_by_expert


def moe_of(spec: DecoderSpec) -> MoeSpec:
    """Return the block that all layers have."""
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp


def expert_bytes(model: Decoder) -> int:
    """Return the bytes of one expert."""
    return 3 * moe_of(model.spec).intermediate_size * model.spec.hidden_size * model.dtype.itemsize


def time_blocks(model: Decoder, probe: Probe, ceilings: Ceilings, num_tokens: int) -> dict[str, Any]:
    """Time the blocks of all layers, as microseconds of one."""
    x, record = probe.randn(num_tokens, model.spec.hidden_size), RoutingRecord()
    blocks = [layer.mlp for layer in model.layers]

    def chain() -> None:
        for block in blocks:
            block(x, NO_BATCH)

    with record.recording():
        chain()
    seconds = probe.wall_seconds(captured(chain) if probe.cuda else chain, 10) / len(blocks)
    hit = record.num_hit / len(blocks)
    flops = 2 * num_tokens * moe_of(model.spec).router.top_k * expert_bytes(model) / model.dtype.itemsize
    floor = max(hit * expert_bytes(model) / ceilings.bytes_per_second, flops / ceilings.flops_per_second)
    return row("experts", num_tokens, hit, seconds, floor)


def time_steps(
    model: Decoder, steps: StepsToMeasure, config: EngineConfig, ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Time decode steps of the whole model; the device's own time of each."""
    assert config.token_budget is not None
    runner = ModelRunner.around(model, config, config.token_budget, ())
    sampling = SamplingParams(max_tokens=10**9, temperature=0.0, ignore_eos=True)
    spec, item, size = model.spec, model.dtype.itemsize, config.page_size
    other_weights = sum(
        torch.Size(shape).numel()
        for address, (_, _, shape) in model.parameters().items()
        if address != "embedding.weight" and (".mlp." not in address or ".router." in address)
    )
    per_token = sum(2 * len(group.layers) * group.token_size for group in spec.kv_groups)
    for batch in steps.batches:
        driver, record = StepDriver(runner, size, sampling), RoutingRecord()
        _, seconds = driver.time_decode(batch, steps.context)
        last = steps.context + NUM_DECODE_STEPS
        num_pages = -(-(last + 1) // size)
        graphs = runner._graphs, runner._mixed_graphs
        runner._graphs = runner._mixed_graphs = None  # the routing of one more step, launched eagerly
        with record.recording():
            driver.decode(last, [range(slot * num_pages, (slot + 1) * num_pages) for slot in range(batch)])
            driver.finish()
        runner._graphs, runner._mixed_graphs = graphs
        kv = batch * (steps.context + NUM_DECODE_STEPS // 2) * per_token
        read = record.num_hit * expert_bytes(model) + (other_weights + kv) * item
        floor = read / ceilings.bytes_per_second
        hit = record.num_hit / spec.num_layers
        yield row("step", batch, hit, seconds, floor)


def row(what: str, tokens: int, hit: float, seconds: float, floor: float) -> dict[str, Any]:
    """Return a line of the table."""
    return {
        "what": what,
        "tokens": tokens,
        "experts hit": hit,
        "µs": seconds * 1e6,
        "floor µs": floor * 1e6,
        "times the floor": seconds / floor,
    }


# Launch parameters to try: features, inputs, warps, stages.
FEW_ROWS = list(itertools.product((16, 32, 64, 128), (64, 128, 256), (4,), (3, 4, 5)))
MANY_ROWS = list(itertools.product((64, 128, 256), (64,), (4, 8), (3, 4)))
MATVECS = list(itertools.product((4, 8, 16), (256, 512, 1024), (2, 4, 8), (1, 3)))
# Tokens, rows of a tile (None: unsorted), parameters.
TUNED = [
    (1, None, FEW_ROWS),
    (16, 16, FEW_ROWS),
    (64, 16, FEW_ROWS),
    (256, 32, FEW_ROWS),
    (256, 64, FEW_ROWS),
]
TUNED += [(1024, 64, MANY_ROWS), (1024, 128, MANY_ROWS), (8192, 128, MANY_ROWS)]
_SHARED_BYTES = 220 << 10


def candidates() -> Iterator[tuple[str, int, int | None, Any]]:
    """Yield op, tokens, rows of a tile and launch parameters."""
    for tokens, rows, parameters in TUNED:
        for gated, shape in itertools.product((True, False), itertools.starmap(TileShape, parameters)):
            tile = (max(16, rows or 0) + shape.block_n * (1 + gated)) * shape.block_k * 2
            if tile * shape.num_stages <= _SHARED_BYTES and (gated or rows is not None):
                yield "gate_up" if gated else "down", tokens, rows, shape
    for shape in itertools.starmap(MatvecShape, MATVECS):
        yield "down", 1, None, shape


def call_of(
    candidate: tuple[str, int, int | None, Any], spec: DecoderSpec, stacks: list[torch.Tensor]
) -> Callable[[], None]:
    """Return a call that runs a candidate once with each of the stacks of weights."""
    op, tokens, rows, shape = candidate
    moe, device = moe_of(spec), stacks[0].device
    torch.manual_seed(tokens)
    top_k, hidden, inner = moe.router.top_k, spec.hidden_size, moe.intermediate_size
    num_experts = stacks[0].shape[0]
    ids = torch.rand(tokens, num_experts, device=device).topk(min(top_k, num_experts)).indices.int()
    groups = group_by_expert_triton(ids.contiguous(), num_experts, rows=rows)
    weights = torch.rand(ids.shape, device=device)
    width = hidden if op == "gate_up" else inner
    x = torch.randn(tokens if op == "gate_up" else ids.numel(), width, device=device, dtype=torch.bfloat16)

    def call() -> None:
        for stack in stacks:
            if op == "gate_up":
                activation = GatedActivation("silu")
                weight = stack.view(num_experts, 2 * inner, hidden)
                grouped_linear_triton(x, weight, groups, activation=activation, shape=shape)
            elif isinstance(shape, MatvecShape):
                weight = stack.view(num_experts, 2 * hidden, inner)
                grouped_linear_sum_triton(x, weight, groups, weights, shape=shape)
            else:
                grouped_linear_triton(x, stack.view(num_experts, 2 * hidden, inner), groups, shape=shape)

    return call


def compile_candidate(candidate: tuple[str, int, int | None, Any]) -> None:
    """Compile a candidate into Triton's cache on disk, in a process of its own."""
    spec = qwen3_moe.spec({**QWEN3_30B_A3B, "num_hidden_layers": 1})
    moe = moe_of(spec)
    stack = torch.zeros(moe.router.top_k, 2 * moe.intermediate_size * spec.hidden_size, device="cuda")
    with suppress(Exception):  # too much shared memory; said when it is timed
        call_of(candidate, spec, [stack.to(torch.bfloat16)])()


def tune(probe: Probe) -> list[dict[str, Any]]:
    """Time all candidates, and return the best of each op and size."""
    spec = qwen3_moe.spec({**QWEN3_30B_A3B, "num_hidden_layers": 1})
    moe = moe_of(spec)
    every = list(candidates())
    with ProcessPoolExecutor(14, get_context("spawn")) as pool:
        list(pool.map(compile_candidate, every))
    # As large as gate and up; a product with half of it takes what `down` does.
    stacks = [probe.randn(moe.num_experts, 2 * moe.intermediate_size * spec.hidden_size) for _ in range(6)]
    found: dict[Any, list[tuple[float, Any]]] = {}
    for candidate in every:
        with suppress(Exception):
            call = call_of(candidate, spec, stacks)
            seconds = probe.wall_seconds(captured(call), 3) / len(stacks)
            found.setdefault(candidate[:3], []).append((seconds * 1e6, tuple(candidate[3])))
    lines = []
    for (op, tokens, rows), times in found.items():
        for microseconds, shape in sorted(times)[:6]:
            lines.append(
                {"op": op, "tokens": tokens, "rows": str(rows), "shape": str(shape), "µs": microseconds}
            )
    return lines


def main() -> None:
    """Measure and print."""
    arguments = parse()
    cuda = torch.cuda.is_available() and HAS_TRITON
    config = EngineConfig(device="cuda" if cuda else "cpu")
    device = choose_device(config)
    set_up_thread(config, device)
    dtype = torch.bfloat16 if cuda else torch.float32
    probe = Probe(device, dtype)
    with torch.inference_mode():
        ceilings = probe.ceilings()
        print(json.dumps(asdict(ceilings)))
        if arguments.tune:
            show("launch parameters", tune(probe), arguments.json)
            return
        sizes, context = ((1, 2, 4, 16, 64, 256, 8192), 512) if cuda else ((1, 4), 16)
        layers = arguments.layers or (24 if cuda else 2)
        spec = qwen3_moe.spec({**(QWEN3_30B_A3B if cuda else TINY), "num_hidden_layers": layers})
        model = random_decoder(spec, dtype, device)
        rows = [time_blocks(model, probe, ceilings, num_tokens) for num_tokens in sizes]
    steps = StepsToMeasure((1, 16, 64, 256) if cuda else (1, 4), context, (context,))
    config = config.model_copy(
        update={
            "max_num_seqs": steps.max_batch,
            "max_model_len": steps.max_model_len,
            "token_budget": steps.token_budget,
            "kv_tokens": steps.kv_tokens(config.page_size),
        }
    )
    rows += time_steps(model, steps, config, ceilings)
    show(f"Qwen3-30B-A3B, {layers} layers", rows, arguments.json)


def parse() -> argparse.Namespace:
    """Read the command line."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--layers", type=int, help="layers of the model")
    flags.add_argument("--tune", action="store_true", help="try launch parameters (CUDA)")
    arguments = flags.parse_args()
    if arguments.tune and not (HAS_TRITON and torch.cuda.is_available()):
        flags.error("--tune needs a CUDA device and triton")
    return arguments


if __name__ == "__main__":
    main()
