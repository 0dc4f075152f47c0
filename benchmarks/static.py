"""Times of single steps on random weights of a real shape: decode at several batch sizes, and prefill.

    python -m benchmarks.static --shape llama-8b --batch 1,16,64,256 --context 512

Steps go through the runner as the engine's loop sends them (run-ahead of one, tokens read back), without
scheduler, tokenizer and server. The floor of a decode step is its matrix products, measured alone in the
same run, plus the KV bytes at the copy bandwidth measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.device.kv_cache import bytes_per_token
from engine.device.runner import ModelRunner, choose_device, set_up_thread
from engine.outputs import NO_PAGE, DecodeRows, Row, SlotInit, StepPlan
from engine.request import SamplingParams
from kernels.linear import linear, pack_weight
from models.loader import random_decoder
from models.shapes import SHAPES
from models.spec import DecoderSpec

NUM_DECODE_STEPS = 128


def synchronize(device: torch.device) -> None:
    """Wait for the device, if there is anything to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, call: Callable[[], object], repeat: int) -> float:
    """Median time of one call, the device drained before and after."""
    times = []
    for _ in range(repeat + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


class Steps:
    """Sends plans to a runner, at most one ahead of the tokens read."""

    def __init__(self, runner: ModelRunner, page_size: int, sampling: SamplingParams) -> None:
        self.runner = runner
        self.page_size = page_size
        self.sampling = sampling
        self.launched: deque = deque()
        self.step_id = 0

    def launch(self, decode: DecodeRows, chunks: tuple[Row, ...] = ()) -> None:
        """Launch a step and read the tokens of the one before it."""
        num_tokens = len(decode.slots) + sum(row.num_tokens for row in chunks)
        self.launched.append(self.runner.launch(StepPlan(self.step_id, decode, chunks, num_tokens)))
        self.step_id += 1
        while len(self.launched) > 1:
            self.launched.popleft().wait()

    def finish(self) -> None:
        """Read what is left."""
        while self.launched:
            self.launched.popleft().wait()

    def prefill(self, slot: int, pages: list[int], length: int) -> None:
        """One prompt of `length` tokens in one step."""
        tokens = tuple((slot * 7919 + index * 31) % 200 for index in range(length))
        init = SlotInit(self.sampling, seed=slot, prompt_token_ids=tokens, output_token_ids=())
        self.launch(DecodeRows.empty(), (Row(slot, slot, 0, tokens, True, tuple(pages), init),))

    def decode(self, batch: int, position: int, pages: list[list[int]]) -> None:
        """One token for every sequence; `position` is that of the token it computes."""
        slots = list(range(batch))
        column, offset = divmod(position, self.page_size)
        new_pages = [NO_PAGE if offset else pages[slot][column] for slot in slots]
        self.launch(DecodeRows(slots, slots, [position] * batch, new_pages))


def matmul_seconds(spec: DecoderSpec, batch: int, dtype: torch.dtype, device: torch.device) -> float:
    """Time of the matrix products of one step of `batch` rows alone, in a CUDA graph where there is one."""
    layer = spec.layers[0]
    heads, kv_heads, dim = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
    hidden, inner = spec.hidden_size, layer.mlp.intermediate_size
    shapes = [
        ((heads + 2 * kv_heads) * dim, hidden),
        (hidden, heads * dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]

    def weight(n: int, k: int):
        return pack_weight(torch.randn(n, k, device=device, dtype=dtype))

    with torch.inference_mode():
        weights = [weight(n, k) for _ in range(spec.num_layers) for n, k in shapes]
        weights.append(weight(spec.vocab_size, hidden))
        inputs = {
            k: torch.randn(batch, k, device=device, dtype=dtype) for k in {w.in_features for w in weights}
        }

        def chain() -> None:
            for packed in weights:
                linear(inputs[packed.in_features], packed)

        if device.type != "cuda":
            return seconds_of(device, chain, 7)
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            chain()
        return seconds_of(device, graph.replay, 20)


def copy_bytes_per_second(device: torch.device) -> float:
    """Bandwidth of a large copy on the device, bytes read plus bytes written."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(device, lambda: target.copy_(source), 10)


def measure(args: argparse.Namespace) -> list[dict]:
    """All rows of the table."""
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        page_size=args.page_size,
        kv_tokens=args.kv_tokens,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.batch),
        token_budget=max([*args.prefill, args.context]),
    )
    device = choose_device(config)
    set_up_thread(config, device)
    spec = SHAPES[args.shape]
    dtype = getattr(torch, args.dtype)
    bandwidth = copy_bytes_per_second(device)
    floors = {batch: matmul_seconds(spec, batch, dtype, device) for batch in args.batch}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.inference_mode():
        model = random_decoder(spec, dtype, device)
    started = time.perf_counter()
    runner = ModelRunner.around(model, config, config.token_budget or 1, ())
    print(f"KV pool {runner.num_pages * args.page_size:,} tokens, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"pool and graphs took {time.perf_counter() - started:.1f} s")
    sampling = SamplingParams(
        max_tokens=10**6, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, ignore_eos=True
    )
    steps = Steps(runner, args.page_size, sampling)
    table = []
    for length in args.prefill:
        pages = list(range(-(-length // args.page_size)))

        def once(length: int = length, pages: list[int] = pages) -> None:
            steps.prefill(0, pages, length)
            steps.finish()

        table.append({"what": f"prefill {length}", "milliseconds": 1e3 * seconds_of(device, once, 5)})
        print(json.dumps(table[-1]), flush=True)
    per_sequence = -(-(args.context + NUM_DECODE_STEPS + 1) // args.page_size)
    for batch in args.batch:
        pages = [list(range(slot * per_sequence, (slot + 1) * per_sequence)) for slot in range(batch)]
        prompt_pages = -(-args.context // args.page_size)
        for slot in range(batch):
            steps.prefill(slot, pages[slot][:prompt_pages], args.context)
        steps.finish()
        synchronize(device)
        times = []
        start = time.perf_counter()
        for index in range(NUM_DECODE_STEPS):
            steps.decode(batch, args.context + index, pages)
            now = time.perf_counter()
            times.append(now - start)
            start = now
        steps.finish()
        context = args.context + NUM_DECODE_STEPS // 2
        kv_seconds = batch * context * bytes_per_token(spec, dtype) / bandwidth
        table.append(
            {
                "what": f"decode batch {batch}",
                "milliseconds": 1e3 * statistics.median(times[8:]),
                "mean_milliseconds": 1e3 * statistics.fmean(times[8:]),
                "matmul_milliseconds": 1e3 * floors[batch],
                "floor_milliseconds": 1e3 * (floors[batch] + kv_seconds),
            }
        )
        print(
            json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in table[-1].items()}),
            flush=True,
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser.add_argument("--shape", default="llama-8b", choices=list(SHAPES))
    parser.add_argument("--batch", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=8193)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    table = measure(args)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
