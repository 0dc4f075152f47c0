"""The pages of layers with tokens of different sizes, in one pool."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device.kv_cache import KVCache
from engine.device.runner import ModelRunner
from engine.machine import keep_freed_memory
from models.decoder import Decoder
from models.loader import random_decoder
from models.shapes import SHAPES
from tests.engine.driver import Driver, output_of
from tests.models.harness import forward_logits

CPU = torch.device("cpu")


def decoder_with(*kinds: tuple[int, int]) -> Decoder:
    """Random weights; a layer for each (KV heads, window)."""
    tiny = SHAPES["tiny"]
    layer = tiny.layers[0]
    layers = [
        replace(layer, attention=replace(layer.attention, num_kv_heads=num_kv_heads, window=window))
        for num_kv_heads, window in kinds
    ]
    with torch.inference_mode():
        return random_decoder(replace(tiny, layers=tuple(layers)), torch.float32, CPU)


def test_one_kind_of_layer_has_pages_of_its_own_shape():
    cache = KVCache.of(decoder_with((2, 0), (2, 0), (2, 0)), 10, 16)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(11, 16, 2, 16)] * 3
    assert (cache.page_scales, cache.windows, cache.num_tokens) == ((1,), (0,), 160)
    pointers = {tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors}
    assert len(pointers) == 6, "no layer shares its memory"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_pool_takes_memory_only_as_its_pages_are_used():
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    keep_freed_memory()  # as a server does: blocks of its allocator may have been used before
    model, before = decoder_with((4, 0), (4, 0)), resident_bytes()
    with ThreadPoolExecutor(1) as thread:
        cache = thread.submit(KVCache.of, model, 4_096, 16).result()
    size = sum(tensor.nbytes for pool in cache.pools for tensor in pool)
    taken = resident_bytes() - before
    assert taken < size / 10, f"{taken:,} of {size:,} bytes are resident before the first token"


@pytest.mark.parametrize("num_tokens", [10**14, 10**20])
def test_a_pool_that_fits_no_memory_is_refused_by_name(num_tokens):
    config = EngineConfig(device="cpu", kv_tokens=num_tokens)
    with pytest.raises(ValueError, match=r"kv_tokens: a pool of 1.* tokens takes .* GiB, more than is free"):
        KVCache.allocate(decoder_with((4, 0)), config, 16)


def test_groups_share_the_tensors_of_the_pool():
    cache = KVCache.of(decoder_with((4, 0), (1, 20), (4, 0), (1, 20)), 10, 16)
    assert (cache.page_scales, cache.windows, cache.num_tokens) == ((1, 4), (0, 20), 80)
    assert len(cache.pools) == 2
    assert tuple(cache.layers[0].keys.shape) == (11, 16, 4, 16)
    assert tuple(cache.layers[1].keys.shape) == (44, 16, 1, 16)
    cache.layers[1].keys[4 * 3 : 4 * 4] = 7.0  # page 3, as the second group sees it
    assert (cache.layers[0].keys[3] == 7.0).all() and (cache.layers[0].keys[[2, 4]] == 0.0).all()
    cache.copy_pages(torch.tensor([3]), torch.tensor([5]))
    assert (cache.layers[1].keys[20:24] == 7.0).all()
    assert (cache.layers[2].keys == 0.0).all(), "the second layer of each group has tensors of its own"


@pytest.mark.parametrize("kinds", [((4, 0), (1, 20)), ((2, 18), (4, 0)), ((4, 0), (1, 0), (2, 20))])
def test_answers_equal_those_of_the_model_without_an_engine(kinds, run_ahead):
    model = decoder_with(*kinds)
    settings = EngineConfig(device="cpu", kv_tokens=256, max_num_seqs=4, page_size=16, run_ahead=run_ahead)
    runner = ModelRunner.around(model, settings, 24, ())
    driver = Driver.of(
        num_pages=runner.num_pages,
        page_size=16,
        run_ahead=run_ahead,
        kv_windows=runner.kv_windows,
        token_budget=24,
        max_num_seqs=4,
        max_model_len=runner.max_model_len,
    )
    driver.runner = runner
    prompts = [[(11 * place + length) % 250 for place in range(length)] for length in (3, 16, 50, 70)]
    sequences = [driver.add(prompt, max_tokens=40, temperature=0.0, ignore_eos=True) for prompt in prompts]
    sequences += driver.add_group(prompts[2], 2, max_tokens=40, temperature=0.0, ignore_eos=True)
    driver.run()
    for sequence in sequences:
        output = output_of(sequence)
        logits = forward_logits(model, sequence.token_ids.tolist())[-len(output) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert gaps.max() < 1e-3


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
def test_groups_with_windows_share_quantized_pages(kv_dtype):
    """Answers are equal alone and among others, whose pages are taken over, returned and copied."""
    model = decoder_with((4, 0), (1, 20), (2, 18))
    prompts = [[(11 * place + length) % 250 for place in range(length)] for length in (3, 16, 50, 70)]

    def answers(prompts: list[list[int]], samples: int) -> list[list[int]]:
        settings = EngineConfig(device="cpu", kv_tokens=256, max_num_seqs=4, page_size=16, kv_dtype=kv_dtype)
        runner = ModelRunner.around(model, settings, 24, ())
        driver = Driver.of(
            num_pages=runner.num_pages,
            page_size=16,
            run_ahead=settings.run_ahead,
            kv_windows=runner.kv_windows,
            token_budget=24,
            max_num_seqs=4,
            max_model_len=runner.max_model_len,
        )
        driver.runner = runner
        options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        groups = [driver.add_group(prompt, samples, **options) for prompt in prompts]
        driver.run()
        return [output_of(sequence) for group in groups for sequence in group]

    alone = [answer for prompt in prompts for answer in answers([prompt], 1)]
    assert answers(prompts, 2) == [answer for answer in alone for _ in range(2)]
