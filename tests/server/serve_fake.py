"""`monoloop` with a FakeEngine in place of the real one: what the tests start as a process of its own."""

import asyncio
import os
import sys
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import FetchFailed, ModelError
from server import cli, lifecycle
from server.metrics import Metrics
from server.settings import Settings
from tests.server.fake_engine import FakeEngine


async def start_fake_engine(
    settings: Settings, metrics: Metrics, on_progress: Callable[[str], None]
) -> FakeEngine:
    """Return an engine with FAKE_CHAT_TEMPLATE once the file FAKE_LOADED, if one is named, is there.

    The model `missing` cannot be found, `far` cannot be fetched.
    """
    if settings.engine.model == "missing":
        raise ModelError("there is no model called missing")
    if settings.engine.model == "far":
        raise FetchFailed("far could not be fetched")
    on_progress("found fake-model")
    loaded = os.environ.get("FAKE_LOADED")
    while loaded and not os.path.exists(loaded):  # noqa: ASYNC110, ASYNC240 - another process makes it
        await asyncio.sleep(0.01)
    if settings.engine.max_model_len == 1:
        raise ValueError("max_model_len: 1 is too little; raise kv_tokens")
    engine = FakeEngine(EngineConfig(max_num_seqs=1024), metrics)
    engine.tokenizer.chat_template = os.environ.get("FAKE_CHAT_TEMPLATE", engine.tokenizer.chat_template)
    return engine


def install() -> None:
    """Put the FakeEngine in place of the real one in this process."""
    lifecycle.start_engine = start_fake_engine  # type: ignore[assignment]


if __name__ == "__main__":
    install()
    sys.exit(cli.main())
