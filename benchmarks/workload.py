"""Workload W through the whole engine, offline: random weights of a real shape, no HTTP.

    python -m benchmarks.workload --shape llama-8b

W is 256 requests that arrive together, with the prompt and output lengths of data/workload_w.json. The
figure is output tokens per second from the first submit to the last token.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models

from engine import Engine, ModelInfo
from engine.config import EngineConfig
from engine.device.runner import ModelRunner, choose_device, set_up_thread
from engine.device.thread import DeviceThread
from engine.request import Request, SamplingParams
from engine.text.tokenizer import TokenizerPool
from models.loader import random_decoder
from models.shapes import SHAPES

WORKLOAD = Path(__file__).parent / "data" / "workload_w.json"


def number_tokenizer(vocab_size: int) -> Any:
    """Every token is a word: its number. Stands in for a real tokenizer's cost of decoding."""
    backend = Tokenizer(models.WordLevel({f" {i}": i for i in range(vocab_size)}, unk_token=" 0"))
    backend.decoder = decoders.Fuse()
    return SimpleNamespace(backend=backend, max_token_chars=8)


async def start_engine(args: argparse.Namespace) -> Engine:
    """An engine around random weights of the named shape."""
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        kv_tokens=args.kv_tokens,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        token_budget=args.token_budget,
        run_ahead=args.run_ahead,
    )
    spec = SHAPES[args.shape]
    device = DeviceThread(config.run_ahead)

    def make_runner() -> ModelRunner:
        torch_device = choose_device(config)
        set_up_thread(config, torch_device)
        with torch.inference_mode():
            model = random_decoder(spec, getattr(torch, args.dtype), torch_device)
        return ModelRunner.around(model, config, args.token_budget, ())

    runner = await device.start(make_runner)
    info = ModelInfo(
        name=args.shape,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=(),
        generation_defaults={},
        dtype=runner.dtype,
        device=runner.device,
        num_pages=runner.num_pages,
        page_size=config.page_size,
        created=int(time.time()),
    )
    tokenizer = TokenizerPool(
        number_tokenizer(spec.vocab_size), num_threads=1, max_model_len=runner.max_model_len
    )
    return Engine(config, info, tokenizer, device, args.token_budget)


def requests_of(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """The requests of W, with random token ids."""
    rng = random.Random(0)
    lengths = json.loads(WORKLOAD.read_text())["requests"][: args.requests]
    return [
        Request(
            str(index),
            tuple(rng.randrange(vocab_size) for _ in range(prompt)),
            SamplingParams(max_tokens=output, temperature=args.temperature, seed=index, ignore_eos=True),
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


async def measure(args: argparse.Namespace) -> None:
    """Run W several times; the first run warms up."""
    engine = await start_engine(args)
    requests = requests_of(args, engine.model.vocab_size)
    for round_number in range(args.rounds):
        before = engine.stats()
        start = time.perf_counter()
        streams = [engine.submit(request) for request in requests]
        await asyncio.gather(*(stream.collect() for stream in streams))
        seconds = time.perf_counter() - start
        after = engine.stats()
        num_tokens = after.generation_tokens_total - before.generation_tokens_total
        idle = (after.device_idle_seconds_total - before.device_idle_seconds_total) / seconds
        result = {
            "round": round_number,
            "requests": len(requests),
            "output_tokens": num_tokens,
            "seconds": round(seconds, 3),
            "output_tokens_per_second": round(num_tokens / seconds, 1),
            "steps": after.steps_total - before.steps_total,
            "device_idle_share": round(idle, 4),
            "preemptions": after.preemptions_total - before.preemptions_total,
        }
        print(json.dumps(result), flush=True)
    await engine.stop()


def main() -> None:
    """Measure and print a line per round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=list(SHAPES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--run-ahead", type=int, default=1, choices=[0, 1])
    parser.add_argument("--temperature", type=float, default=0.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
