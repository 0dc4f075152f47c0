"""What several tests of the engine start from."""

import pytest
import torch

from engine.constraints.grammar import GrammarCompiler
from models.loader import random_decoder
from models.shapes import SHAPES
from tests.engine.tiny_engine import tiny_vocabulary
from tests.gpu_thread import gpu_thread


@pytest.fixture(params=[0, 1], ids=["run_ahead_0", "run_ahead_1"])
def run_ahead(request) -> int:
    """Steps launched before the tokens of the step before them are read."""
    return request.param


@pytest.fixture
def make_tokenizer(tmp_path):
    """Saves a small tokenizer with a template (or several, by name), and loads it."""
    from transformers import PreTrainedTokenizerFast

    from engine.text.tokenizer import Tokenizer
    from tests.engine.text.test_detokenizer import EOS, byte_level

    def make(
        template: str | dict[str, str] | None,
        response_template: dict | None = None,
        *,
        chat_template: str | None = None,
        **tokens: str,
    ) -> Tokenizer:
        hf = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS, **tokens)
        hf.chat_template = template
        hf.response_template = response_template
        hf.save_pretrained(tmp_path)
        return Tokenizer(tmp_path, chat_template)

    return make


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    """A tiny decoder of random weights, on each device there is."""
    device = torch.device(request.param)
    with gpu_thread(device), torch.inference_mode():
        yield random_decoder(SHAPES["tiny"], torch.float32, device)


@pytest.fixture
async def compiler():
    """Compiles grammars for the tiny tokenizer."""
    compiler = GrammarCompiler(tiny_vocabulary())
    yield compiler
    compiler.close()
