"""A whole engine around the toy model: real loop, threads, scheduler and detokenizer, no weights."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models

from engine import Engine, ModelInfo
from engine.config import EngineConfig
from engine.constraints.grammar import GrammarCompiler
from engine.device.thread import DeviceThread
from engine.engine import open_listeners
from engine.outputs import StepPlan
from engine.request import Request, SamplingParams
from engine.stats import RequestTimes
from engine.text.token_bytes import TokenPieces
from engine.text.tokenizer_pool import TokenizerPool
from tests.engine.toy import EOS, HIDDEN_SIZE, VOCAB_SIZE, ToyRunner, reference

CHARS = [chr(0x4E00 + token_id) for token_id in range(VOCAB_SIZE)]


def to_text(token_ids: list[int]) -> str:
    """Text of toy tokens: one character each."""
    return "".join(CHARS[token_id] for token_id in token_ids)


def toy_tokenizer(chars: Sequence[str] = CHARS) -> Tokenizer:
    """One character a token."""
    tokenizer = Tokenizer(models.WordLevel({char: i for i, char in enumerate(chars)}, unk_token=chars[0]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def request(prompt: list[int], max_tokens: int = 10, *, seed: int = 7, **sampling: Any) -> Request:
    """A request with prompt and settings for sampling."""
    return Request("r", tuple(prompt), SamplingParams(max_tokens=max_tokens, seed=seed, **sampling))


def expected(prompt: list[int], max_tokens: int = 10, **kwargs: Any) -> str:
    """The text of that request."""
    return to_text(reference(prompt, max_tokens, seed=7, **kwargs))


class Recorder:
    """Keeps what the engine reports."""

    def __init__(self):
        self.finished: list[RequestTimes] = []
        self.first_tokens = 0
        self.tokens = 0
        self.steps = 0

    def step_finished(self, seconds, num_tokens, num_rows):
        assert seconds >= 0
        assert num_tokens >= num_rows
        self.steps += 1

    def first_token(self, seconds):
        self.first_tokens += 1

    def inter_token(self, seconds, num_tokens):
        self.tokens += num_tokens

    def request_finished(self, times):
        self.finished.append(times)

    def loop_lag(self, seconds):
        assert seconds >= 0


@asynccontextmanager
async def toy_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    token_budget: int = 32,
    max_model_len: int | None = None,
    before_step: Callable[[StepPlan], None] | None = None,
    observer: Any = None,
    listeners: Sequence[Any] = (),
    **config: Any,
):
    """A running engine; yields it and checks at the end that nothing leaked."""
    settings = EngineConfig(page_size=1, **config)
    device = DeviceThread(settings.run_ahead)
    runner = await device.start(lambda: ToyRunner(num_pages, page_size, before_step))
    model = ModelInfo(
        name="toy",
        max_model_len=max_model_len or num_pages * page_size,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        eos_token_ids=(EOS,),
        generation_defaults={},
        dtype="int64",
        device="cpu",
        num_pages=num_pages,
        page_size=page_size,
        created=0,
    )
    tokenizer: Any = SimpleNamespace(
        backend=toy_tokenizer(),
        pieces=TokenPieces(toy_tokenizer()),
        max_token_chars=1,
        chat_template=None,
        tool_template=None,
        response_template=None,
        added_tokens={},
    )
    pool = TokenizerPool(tokenizer, num_threads=1, max_model_len=model.max_model_len)
    listeners = [*open_listeners(settings), *listeners]
    for listener in listeners:
        listener.started(model, settings, token_budget, "toy")
    grammars = GrammarCompiler(None)  # the toy model chooses as it likes
    engine = Engine(settings, model, pool, device, grammars, token_budget, observer, listeners)
    engine.toy_runner = runner
    try:
        yield engine
    finally:
        await engine.stop()
        assert engine.stats().pages_used == 0


async def idle(engine: Engine) -> None:
    """Wait until the engine holds nothing."""
    for _ in range(10_000):
        stats = engine.stats()
        if not (stats.running or stats.waiting or stats.pages_used):
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"still busy: {engine.stats()}")
