"""Workload W through the whole engine, with random weights of a real shape: offline, and over HTTP.

    python -m benchmarks.workload --shape llama-8b [--http]

W is 256 requests that arrive together, with the prompt and output lengths of data/workload_w.json. Offline,
the figure is output tokens per second from the first submit to the last token. With --http every round is run
a second time as live SSE streams: our server in this process, `monoloop bench` as the client in another, and
the figure is the client's, from its first connection to the last end of a stream.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import machine
from benchmarks.in_process import MAX_CHUNKS_PER_SECOND, Recorder, drive, engine_around, run, serving
from engine import Engine
from engine.bench.steps import SHAPE_NAMES, random_runner
from engine.config import EngineConfig, KVDtype
from engine.device.devices import choose_device, set_up_thread
from engine.device.runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.stats import EngineStats
from models.formats import CONVERSIONS
from server.commands.bench.workload import read_lengths

WORKLOAD = Path(__file__).parent / "data" / "workload_w.json"


def requests_of(lengths: list[tuple[int, int]], sampling: dict[str, Any], vocab_size: int) -> list[Request]:
    """Requests of these lengths, with random token ids."""
    rng = random.Random(0)
    return [
        Request(
            str(index),
            tuple(rng.randrange(vocab_size) for _ in range(prompt)),
            SamplingParams(max_tokens=output, seed=index, ignore_eos=True, **sampling),
        )
        for index, (prompt, output) in enumerate(lengths)
    ]


async def offline(engine: Engine, requests: list[Request]) -> float:
    """Submit all at once; returns the seconds to the last token."""
    start = time.perf_counter()
    streams = [engine.submit(request) for request in requests]
    await asyncio.gather(*(stream.collect() for stream in streams))
    return time.perf_counter() - start


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run W several times each way; the first round warms up."""
    config = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_dtype=args.kv_dtype,
        kv_tokens=args.kv_tokens,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        token_budget=args.token_budget,
        run_ahead=args.run_ahead,
        prefix_cache=False,  # rounds repeat their prompts
        max_chunks_per_second=args.max_chunks_per_second,
    )

    def make_runner() -> ModelRunner:
        set_up_thread(config, choose_device(config))
        return random_runner(args.shape, config)

    recorder = Recorder()
    lengths = read_lengths(WORKLOAD)[: args.requests]
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    rows = []
    async with (
        engine_around(args.shape, config, make_runner, recorder) as engine,
        serving(engine, recorder) as url,
    ):
        requests = requests_of(lengths, sampling, engine.model.vocab_size)
        for number in range(args.rounds):
            for way in ("offline", "http") if args.http else ("offline",):
                recorder.clear()
                before = engine.stats()
                more = {}
                if way == "offline":
                    seconds = await offline(engine, requests)
                else:
                    report = await drive(url, lengths, len(lengths))
                    seconds = report["elapsed_seconds"]
                    more = {
                        "of_offline": round(rows[-1]["seconds"] / seconds, 4),
                        "tokens_per_chunk": round(report["output_tokens"] / report["chunks"], 2),
                        "client_lag_p99_milliseconds": round(1e3 * report["client_lag_p99_seconds"], 2),
                    }
                row = {"round": number, "way": way, **figures(before, engine.stats(), seconds, recorder)}
                rows.append(row | more)
                print(json.dumps(rows[-1]), flush=True)
    return rows


def figures(before: EngineStats, after: EngineStats, seconds: float, recorder: Recorder) -> dict[str, Any]:
    """What the engine says of a run that took `seconds`."""
    num_tokens = after.generation_tokens_total - before.generation_tokens_total
    idle_seconds = after.device_idle_seconds_total - before.device_idle_seconds_total
    return {
        "output_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_tokens / seconds, 1),
        "steps": after.steps_total - before.steps_total,
        "device_busy_seconds": round(sum(recorder.step_seconds), 3),
        "device_idle_share": round(idle_seconds / seconds, 4),
        "loop_lag_p50_milliseconds": round(recorder.lag_milliseconds(50), 2),
        "loop_lag_p99_milliseconds": round(recorder.lag_milliseconds(99), 2),
        "preemptions": after.preemptions_total - before.preemptions_total,
    }


def main() -> None:
    """Measure and print a line per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=SHAPE_NAMES)
    parser.add_argument("--http", action="store_true", help="each round over HTTP, too (greedy)")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["auto", *CONVERSIONS], default="auto")
    parser.add_argument("--kv-dtype", default="auto", choices=get_args(KVDtype))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--run-ahead", type=int, default=1, choices=[0, 1])
    parser.add_argument("--max-chunks-per-second", type=int, default=MAX_CHUNKS_PER_SECOND)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    if args.http and (args.temperature, args.top_p, args.top_k) != (0.0, 1.0, 0):
        parser.error("--http is greedy: monoloop bench asks for nothing else")
    rows = run(measure(args))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
