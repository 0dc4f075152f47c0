"""An engine around a runner of one's own, and our server around the engine, in this process.

The client runs in a process of its own, as clients do: `monoloop bench`.
"""

import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from engine import Engine, ModelInfo
from engine.config import EngineConfig
from engine.constraints.grammar import GrammarCompiler
from engine.device.runner import ModelRunner
from engine.device.thread import DeviceThread
from engine.text.token_bytes import TokenPieces
from engine.text.tokenizer_pool import TokenizerPool
from server.app import build_app
from server.config import ServerConfig
from server.context import ServerContext
from server.garbage import collect_rarely
from server.lifecycle import Server, loop_factory, raise_file_limit
from server.listener import bind, url_of
from server.metrics import Metrics
from server.settings import Settings

HOST = "127.0.0.1"
MAX_CHUNKS_PER_SECOND = EngineConfig().max_chunks_per_second


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` on the event loop that the server uses; returns its result."""
    with asyncio.Runner(loop_factory=loop_factory(ServerConfig())) as runner:
        return runner.run(main)


class Recorder(Metrics):
    """The server's metrics, which also keep every lateness of the loop and every step's device time."""

    def __init__(self) -> None:
        super().__init__()
        self.lags: list[float] = []
        self.step_seconds: list[float] = []

    def loop_lag(self, seconds: float) -> None:
        """Note a lateness."""
        super().loop_lag(seconds)
        self.lags.append(seconds)

    def step_finished(self, seconds: float, num_tokens: int, num_rows: int) -> None:
        """Note a step."""
        super().step_finished(seconds, num_tokens, num_rows)
        self.step_seconds.append(seconds)

    def clear(self) -> None:
        """Forget what was kept."""
        self.lags.clear()
        self.step_seconds.clear()

    def lag_milliseconds(self, percent: float) -> float:
        """A percentile of what was kept."""
        return 1e3 * float(np.percentile(self.lags, percent)) if self.lags else 0.0


def number_tokenizer(vocab_size: int) -> Any:
    """Every token is a word: its number. Stands in for a real tokenizer's cost of decoding."""
    backend = Tokenizer(models.WordLevel({f" {i}": i for i in range(vocab_size)}, unk_token=" 0"))
    backend.decoder = decoders.Fuse()
    return SimpleNamespace(
        backend=backend,
        pieces=TokenPieces(backend),
        max_token_chars=8,
        chat_template=None,
        tool_template=None,
        added_tokens={},
        response_template=None,
    )


@asynccontextmanager
async def engine_around(
    name: str, config: EngineConfig, make_runner: Callable[[], ModelRunner], recorder: Recorder
) -> AsyncIterator[Engine]:
    """An engine around the runner that `make_runner` makes on the device thread, until the block ends."""
    device = DeviceThread(config.run_ahead)
    runner = await device.start(make_runner)
    info = ModelInfo(
        name=name,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        hidden_size=runner.hidden_size,
        eos_token_ids=(),
        generation_defaults={},
        dtype=runner.dtype,
        device=runner.device,
        num_pages=runner.num_pages,
        kv_windows=runner.kv_windows,
        has_states=runner.has_states,
        short_context=runner.short_context,
        page_size=config.page_size,
        created=int(time.time()),
    )
    tokenizer = TokenizerPool(
        number_tokenizer(runner.vocab_size), num_threads=1, max_model_len=runner.max_model_len
    )
    assert config.token_budget is not None
    engine = Engine(config, info, tokenizer, device, GrammarCompiler(None), config.token_budget, recorder)
    recorder.attach(engine.stats, name, info.max_model_len)
    collect_rarely()  # as the server does once its engine is there
    try:
        yield engine
    finally:
        await engine.stop()
        gc.unfreeze()


@asynccontextmanager
async def serving(engine: Engine, metrics: Metrics) -> AsyncIterator[str]:
    """Our server around `engine` on a free port of loopback, until the block ends; yields its URL."""
    raise_file_limit()
    settings = Settings(engine.config, ServerConfig(host=HOST, port=0))
    listener = bind(HOST, 0)
    url = url_of(listener, ServerConfig(host=HOST))
    server = Server(settings, listener)
    app = build_app(None, settings.server, metrics)
    context: ServerContext = app.state.context
    context.attach(engine)
    http = asyncio.create_task(server.serve_http(app), name="http")
    try:
        yield url
    finally:
        await server.end_http(http)


async def drive(url: str, lengths: Sequence[tuple[int, int]], streams: int) -> dict[str, Any]:
    """Run `monoloop bench` against `url` with these (prompt, output) lengths; returns its report."""
    return await asyncio.to_thread(run_client, url, lengths, streams)


def run_client(url: str, lengths: Sequence[tuple[int, int]], streams: int) -> dict[str, Any]:
    """The same, in a thread: it waits for the process."""
    with tempfile.TemporaryDirectory() as folder:
        workload, report = Path(folder, "workload.json"), Path(folder, "report.json")
        workload.write_text(json.dumps({"requests": list(lengths)}))
        command = [sys.executable, "-m", "server", "bench", "--url", url, "--workload", str(workload)]
        command += ["--concurrency", str(streams), "--json", str(report)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"monoloop bench ended with {done.returncode}:\n{done.stdout}")
        found: dict[str, Any] = json.loads(report.read_text())["report"]
        return found
