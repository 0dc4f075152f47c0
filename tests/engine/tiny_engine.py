"""A whole engine around a tiny model of random weights, with a tokenizer of bytes: it can write anything."""

from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine import Engine, ModelInfo
from engine.config import EngineConfig
from engine.constraint import MatchState
from engine.constraints.grammar import GrammarCompiler, Vocabulary
from engine.device.runner import ModelRunner
from engine.device.thread import DeviceThread
from engine.request import Request, SamplingParams
from engine.text.token_bytes import TokenPieces
from engine.text.tokenizer import Tokenizer as LoadedTokenizer
from engine.text.tokenizer_pool import TokenizerPool
from models.decoder import Decoder
from models.loader import random_decoder
from models.shapes import SHAPES

VOCAB_SIZE = 330  # wider than the tokenizer's vocabulary, as many models' logits are
NUM_WORDS = -(-VOCAB_SIZE // 32)  # of a mask: a bit for each token, and some to spare
# Longer tokens: some that cross the borders of JSON's own tokens, some that hold parts of characters.
MERGES = [
    '{ "',
    '" :',
    '" ,',
    '" }',
    "t r",
    "u e",
    "tr ue",
    "n u",
    "l l",
    "nu ll",
    "1 0",
    "Ã ¤",
    "ä ½",
    "Ġ Ġ",
]


@lru_cache
def tiny_tokenizer() -> Tokenizer:
    """A token for each byte, and for each of MERGES, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *(m.replace(" ", "") for m in MERGES)])}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<turn>", special=True)])
    return tokenizer


EOS: int = tiny_tokenizer().token_to_id("<eos>")


@lru_cache
def tiny_vocabulary(has_eos: bool = True) -> Vocabulary:
    """What grammars know of the tokenizer."""
    return Vocabulary(tiny_tokenizer(), (EOS,) if has_eos else ())


@lru_cache
def tiny_model():
    """Random weights whose outputs differ enough to wander."""
    torch.manual_seed(5)
    with torch.inference_mode():
        return random_decoder(
            replace(SHAPES["tiny"], vocab_size=VOCAB_SIZE), torch.float32, torch.device("cpu")
        )


class TinyTokenizer(LoadedTokenizer):
    """As if it had been loaded from a folder without templates."""

    def __init__(self) -> None:
        self.backend = tiny_tokenizer()
        self.pieces = TokenPieces(self.backend)
        self.max_token_chars = 4
        self.added_tokens: dict[str, int] = {}
        self.chat_template = self.tool_template = self.response_template = None


@asynccontextmanager
async def tiny_engine(
    *, has_eos: bool = True, token_budget: int = 64, model: Decoder | None = None, **config: Any
):
    """A running engine; checks at the end that nothing leaked."""
    eos = (EOS,) if has_eos else ()
    defaults: dict[str, Any] = {"kv_tokens": 8192, "max_num_seqs": 16, "page_size": 16, "threads": 1}
    settings = EngineConfig(device="cpu", **(defaults | config))
    device = DeviceThread(settings.run_ahead)
    runner = await device.start(
        lambda: ModelRunner.around(model or tiny_model(), settings, token_budget, eos)
    )
    info = ModelInfo(
        name="tiny",
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        hidden_size=runner.hidden_size,
        eos_token_ids=eos,
        generation_defaults={},
        dtype=runner.dtype,
        device=runner.device,
        num_pages=runner.num_pages,
        kv_windows=runner.kv_windows,
        has_states=runner.has_states,
        short_context=runner.short_context,
        page_size=settings.page_size,
        created=0,
    )
    pool = TokenizerPool(TinyTokenizer(), num_threads=1, max_model_len=info.max_model_len)
    engine = Engine(settings, info, pool, device, GrammarCompiler(tiny_vocabulary(has_eos)), token_budget)
    try:
        yield engine
    finally:
        await engine.stop()
        assert engine.stats().pages_used == 0


def tiny_request(prompt: str, max_tokens: int = 200, *, seed: int = 7, **sampling: Any) -> Request:
    """A request for a text."""
    ids = tiny_tokenizer().encode(prompt, add_special_tokens=False).ids
    return Request("r", tuple(ids), SamplingParams(max_tokens=max_tokens, seed=seed, **sampling))


def allowed(matcher: Any, *token_ids: int) -> tuple[set[int], MatchState]:
    """What may follow, once these tokens have come, too; and how the matcher stands then."""
    masks = np.full((1, NUM_WORDS), -1, np.int32)
    [state] = type(matcher).fill_masks([matcher], [token_ids], masks)
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()), state


async def answers(engine: Engine, requests: Sequence[Request]) -> list[Any]:
    """The whole answers of requests that run at the same time."""
    streams = [engine.submit(request) for request in await engine.prepare(requests)]
    return [await stream.collect() for stream in streams]
