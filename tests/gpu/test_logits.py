"""Logits of the 1B and 8B shapes against transformers with the same weights on the same card.

Both are held against transformers in float32: what is left is rounding in 16 bits, and ours may have hardly
more of it than transformers has.
"""

import gc
import re
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.families.llama import WEIGHT_MAP
from models.loader import empty_decoder, random_decoder, random_tensors
from models.shapes import CONFIGS, SHAPES
from tests.gpu.driver import relative_error
from tests.models.harness import forward_logits

# One model at a time: the 8B shape takes 48 GB.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large")]

SHAPE_NAMES = ["llama-1b", "llama-8b"]
# Prefill, decode rows, and a chunk that continues a sequence.
CHUNKS = [130, 1, 1, 1, 60, 1]
# Ours may err by this factor more than transformers, and by this much more.
FACTOR, MARGIN = 1.25, 5e-4
# What 16 bits and this many layers explain; more would be a fault of both.
LARGEST = {torch.bfloat16: 5e-2, torch.float16: 1e-2}


def hugging_face_names(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Our addresses as transformers names them."""
    names = {ours: theirs for theirs, ours in WEIGHT_MAP.items() if ours is not None}
    for address, tensor in tensors:
        stem = address.removesuffix(".weight")
        number = re.search(r"\.(\d+)\.", stem)
        name = names[re.sub(r"\.\d+\.", ".*.", stem)]
        yield f"{name.replace('*', number[1]) if number else name}.weight", tensor


def their_logits(
    shape: str, dtype: torch.dtype, computed_in: torch.dtype, token_ids: list[int], device: torch.device
) -> torch.Tensor:
    """Logits [num_tokens, vocab_size] on the CPU, of random weights rounded to `dtype`."""
    decoder = empty_decoder(SHAPES[shape], dtype, device)
    state = {name: tensor.to(computed_in) for name, tensor in hugging_face_names(random_tensors(decoder))}
    config = LlamaConfig(**CONFIGS[shape])
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    model.eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids], device=device)).logits[0].float().cpu()


def skip_unless_it_fits(shape: str, device: torch.device) -> None:
    """The float32 model takes 4 bytes a parameter, and a little beside them."""
    parameters = empty_decoder(SHAPES[shape], torch.float32, torch.device("meta")).parameters()
    needed = 5 * sum(torch.Size(size).numel() for _, _, size in parameters.values())
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < needed:
        pytest.skip(f"{shape} in float32 needs {needed / 2**30:.0f} GiB")


def freed(logits: torch.Tensor) -> torch.Tensor:
    """Give back the memory of the model that computed these."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_no_further_from_float32_than_transformers(shape, dtype, device):
    skip_unless_it_fits(shape, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPES[shape].vocab_size, (sum(CHUNKS),), generator=generator).tolist()
    exact = freed(their_logits(shape, dtype, torch.float32, ids, device))
    theirs = relative_error(freed(their_logits(shape, dtype, dtype, ids, device)), exact)
    logits = freed(forward_logits(random_decoder(SHAPES[shape], dtype, device), ids, CHUNKS))
    ours = relative_error(logits, exact)
    print(f"{shape}, {dtype}: relative error {ours:.2e}, transformers {theirs:.2e}")
    assert theirs < LARGEST[dtype], f"transformers itself is {theirs:.1e} off: the reference is wrong"
    assert ours < FACTOR * theirs + MARGIN, f"relative error {ours:.2e}, transformers {theirs:.2e}"
    same = (logits.argmax(-1) == exact.argmax(-1)).float().mean().item()
    print(f"  the most likely token is that of float32 at {same:.0%} of the positions")
