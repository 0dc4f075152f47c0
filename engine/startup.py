"""Loads a model by name and creates the engine's parts. Slow work runs in threads."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.constraints.grammar import GrammarCompiler, Vocabulary
from engine.device.devices import choose_device
from engine.device.fit import check_lengths
from engine.device.formats import with_formats
from engine.device.runner import ModelRunner
from engine.device.thread import DeviceThread
from engine.errors import FetchFailed, ModelError
from engine.machine import trim_heap
from engine.model_info import ModelInfo
from engine.readouts import Pooling
from engine.text.chat_template import read_template
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_pool import TokenizerPool
from models import catalog
from models.fingerprint import fingerprint
from models.model_files import ModelFiles

logger = logging.getLogger("monoloop.engine")

# Short enough steps on a laptop that a prompt delays other streams by about a second at most; on a GPU long
# enough to fill its matrix units.
CPU_TOKEN_BUDGET = 512
CUDA_TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class EngineParts:
    """The parts an Engine is created from."""

    model: ModelInfo
    tokenizer: TokenizerPool
    device: DeviceThread
    grammars: GrammarCompiler
    token_budget: int
    files: ModelFiles

    def fingerprint(self) -> str:
        """Return a fingerprint of the model's weights; reads samples of them."""
        return fingerprint(self.files)


async def load(config: EngineConfig, on_progress: Callable[[str], None]) -> EngineParts:
    """Locate the model, then load weights and tokenizer side by side.

    Raises ModelError, or ValueError naming the setting that cannot be met.
    """
    started = time.perf_counter()

    def report(what: str) -> None:
        on_progress(f"{what} ({time.perf_counter() - started:.1f} s since start)")

    path = config.chat_template
    template = None if path is None else await asyncio.to_thread(read_template, path)
    files = await locate(config.model, config.cache_dir)
    report(f"found {files.name}")
    pooling = choose_pooling(config, files)
    config = await asyncio.to_thread(with_formats, config, files, choose_device(config))
    token_budget = config.token_budget or default_token_budget(config)
    await asyncio.to_thread(check_lengths, config, files, token_budget)
    device = DeviceThread(config.run_ahead)
    tokenizing = asyncio.create_task(asyncio.to_thread(load_tokenizer, files, template))
    try:
        runner, (tokenizer, vocabulary) = await asyncio.gather(
            device.start(lambda: ModelRunner.load(config, files, token_budget)), tokenizing
        )
    except BaseException:
        await asyncio.wait([tokenizing])  # or it imports modules while another start does
        await device.stop()
        raise
    trim_heap()
    in_kv_dtype = "" if config.kv_dtype == "auto" else f" in {config.kv_dtype}"
    report(
        f"loaded weights and tokenizer; {runner.dtype} on {runner.device}, "
        f"KV pool of {runner.num_kv_tokens:,} tokens of {runner.kv_token_bytes:,} bytes{in_kv_dtype}, "
        f"context of {runner.max_model_len:,}"
    )
    return EngineParts(
        model=ModelInfo(
            name=files.name,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            hidden_size=runner.hidden_size,
            eos_token_ids=files.eos_token_ids,
            generation_defaults=files.generation_defaults,
            dtype=runner.dtype,
            device=runner.device,
            num_pages=runner.num_pages,
            page_size=config.page_size,
            kv_windows=runner.kv_windows,
            has_states=runner.has_states,
            short_context=runner.short_context,
            created=int(time.time()),
            quantization=config.conversion,
            kv_dtype=config.kv_dtype,
            pooling=pooling,
            is_embedding_model=files.pooling is not None,
            matryoshka=files.matryoshka,
            num_labels=runner.num_labels,
        ),
        tokenizer=TokenizerPool(
            tokenizer,
            num_threads=config.tokenizer_threads,
            max_model_len=runner.max_model_len,
            timeout_seconds=config.watchdog_timeout_seconds,
        ),
        device=device,
        grammars=GrammarCompiler(vocabulary, open_objects=config.open_objects),
        token_budget=token_budget,
        files=files,
    )


def load_tokenizer(
    files: ModelFiles, chat_template: str | None = None
) -> tuple[Tokenizer, Vocabulary | None]:
    """Return the tokenizer, and its vocabulary for grammars if it allows any. Raises ModelError."""
    tokenizer = Tokenizer(files.tokenizer_dir, chat_template)
    try:
        return tokenizer, Vocabulary(tokenizer.backend, files.eos_token_ids)
    except ValueError as error:
        logger.warning("structured output is not available: %s", error)
        return tokenizer, None


def choose_pooling(config: EngineConfig, files: ModelFiles) -> Pooling:
    """Return the pooling of embeddings. Raises ValueError if the model needs one that is not supported."""
    if config.pooling != "auto":
        return config.pooling
    if files.pooling in (None, "mean"):
        return "mean"
    if files.pooling == "last":
        return "last"
    raise ValueError(
        f"pooling: the model's files ask for {files.pooling}, which is not supported; with mean or last its "
        "embeddings are others than its authors'"
    )


def default_token_budget(config: EngineConfig) -> int:
    """Return the token budget of a step for settings without one."""
    return CPU_TOKEN_BUDGET if choose_device(config).type == "cpu" else CUDA_TOKEN_BUDGET


async def locate(name: str, cache_dir: Path | None) -> ModelFiles:
    """Return the model's files on this machine, downloading them if needed. Raises ModelError."""
    return await asyncio.to_thread(find, name, cache_dir)


def find(name: str, cache_dir: Path | None) -> ModelFiles:
    """Return the model's files, like locate(), but block. Raises ModelError."""
    try:
        return catalog.locate(name, cache_dir)
    except catalog.FetchFailed as error:
        raise FetchFailed(str(error)) from error
    except catalog.ModelError as error:
        raise ModelError(str(error)) from error
