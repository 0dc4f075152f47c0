"""The loop alone: the real engine and server, with a model that computes nothing and takes a given time.

    python -m benchmarks.loop [--step-milliseconds 3,12] [--streams 256]

What is asked is whether HTTP in the same process keeps the device waiting. The model's forward pass is one
kernel that spins, captured in the same graphs as a real one's, so that staging, replay, sampling, commit,
text and SSE are those of a real run. Streams are live ones of a client in another process. On a CPU the pass
sleeps, which shows that all runs.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import parser, show
from benchmarks.in_process import MAX_CHUNKS_PER_SECOND, Recorder, drive, engine_around, run, serving
from engine.config import EngineConfig
from engine.device.devices import choose_device, set_up_thread
from engine.device.runner import ModelRunner
from kernels.kv_layer import KVLayer
from models.formats.base import WHOLE
from models.forward_batch import ForwardBatch
from models.shapes import SHAPES

VOCAB_SIZE = 32_768
TOKEN_BUDGET = 8192
CALIBRATION_CYCLES = 20_000_000


class NullModel:
    """Stands in for a Decoder: waits `step_seconds` and returns the same logits for every row."""

    def __init__(self, step_seconds: float, max_rows: int, max_len: int, device: torch.device) -> None:
        self.spec = dataclasses.replace(SHAPES["tiny"], vocab_size=VOCAB_SIZE, max_position=max_len)
        self.dtype = torch.bfloat16
        self.device = device
        self.shard = WHOLE
        self._step_seconds = step_seconds
        self._cycles = int(step_seconds * cycles_per_second()) if device.type == "cuda" else 0
        self._logits = torch.randn(max_rows, VOCAB_SIZE, device=device)

    def __call__(self, batch: ForwardBatch, kv: Sequence[KVLayer]) -> torch.Tensor:
        """Take the time; returns hidden states [num_hidden, hidden_size]."""
        self._wait()
        tokens = batch.token_ids if batch.hidden_indices is None else batch.hidden_indices
        return torch.zeros(tokens.shape[0], self.spec.hidden_size, device=self.device)

    def _wait(self) -> None:
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        else:
            time.sleep(self._step_seconds)

    # The same in a Decoder's two parts, of which the first takes the time.

    def body(self, batch: ForwardBatch, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the time; returns what was attended to, and the residual."""
        self._wait()
        nothing = torch.zeros(batch.token_ids.shape[0], 1, device=self.device)
        return nothing, nothing.expand(-1, self.spec.hidden_size)

    def tail(self, _attention_out: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [num_hidden, hidden_size]."""
        return residual if batch.hidden_indices is None else residual[batch.hidden_indices]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_rows, VOCAB_SIZE] fp32."""
        logits = self._logits[: hidden.shape[0]]
        return logits.clone() if out is None else out.copy_(logits)  # the sampler may write there


def cycles_per_second() -> float:
    """How fast the counter runs that the spinning kernel looks at."""
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return CALIBRATION_CYCLES / statistics.median(times)


async def measure(step_milliseconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """One warm-up and one run at one step time."""
    max_len = args.prompt_tokens + args.output_tokens
    config = EngineConfig(
        device=args.device,
        max_num_seqs=args.streams,
        token_budget=TOKEN_BUDGET,
        kv_tokens=args.streams * (max_len + 16),
        run_ahead=args.run_ahead,
        prefix_cache=False,
        max_chunks_per_second=args.max_chunks_per_second,
    )

    def make_runner() -> ModelRunner:
        device = choose_device(config)
        set_up_thread(config, device)
        model: Any = NullModel(step_milliseconds / 1e3, args.streams, max_len, device)
        return ModelRunner.around(model, config, TOKEN_BUDGET, ())

    recorder = Recorder()
    async with (
        engine_around("null", config, make_runner, recorder) as engine,
        serving(engine, recorder) as url,
    ):
        await drive(url, [(args.prompt_tokens, min(32, args.output_tokens))] * args.streams, args.streams)
        recorder.clear()
        before = engine.stats()
        lengths = [(args.prompt_tokens, args.output_tokens)] * args.streams
        report = await drive(url, lengths, args.streams)
        after = engine.stats()
    seconds = report["elapsed_seconds"]
    step_seconds = statistics.median(recorder.step_seconds)
    return {
        "step": f"{step_milliseconds:g} ms",
        "device step ms": 1e3 * step_seconds,
        "streams": args.streams,
        "device idle %": 100 * (after.device_idle_seconds_total - before.device_idle_seconds_total) / seconds,
        "lag p50 ms": recorder.lag_milliseconds(50),
        "lag p99 ms": recorder.lag_milliseconds(99),
        "chunks/s": report["chunks"] / seconds,
        "tokens/s": report["output_tokens"] / seconds,
        "device's tokens/s": args.streams / step_seconds,
        "client lag p99 ms": 1e3 * report["client_lag_p99_seconds"],
    }


def main() -> None:
    """Measure and print a row per step time."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--step-milliseconds", default="3,12", help="times of the null model's step")
    flags.add_argument("--streams", type=int, default=256)
    flags.add_argument("--prompt-tokens", type=int, default=16)
    flags.add_argument("--output-tokens", type=int, default=512)
    flags.add_argument("--run-ahead", type=int, default=1, choices=[0, 1])
    flags.add_argument("--max-chunks-per-second", type=int, default=MAX_CHUNKS_PER_SECOND)
    flags.add_argument("--switch-interval-milliseconds", type=float, default=1e3 * sys.getswitchinterval())
    flags.add_argument("--device", default="auto")
    args = flags.parse_args()
    sys.setswitchinterval(args.switch_interval_milliseconds / 1e3)
    rows = [run(measure(float(text), args)) for text in args.step_milliseconds.split(",")]
    show("the loop with a model that computes nothing", rows, args.json)


if __name__ == "__main__":
    main()
