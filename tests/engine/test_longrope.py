"""LongRoPE in an engine: a sequence that becomes a long one is computed again, with its other angles."""

import asyncio

import pytest
import torch

from engine.request import Request, SamplingParams
from models.loader import load
from tests.engine.tiny_engine import tiny_engine
from tests.models.families import make, prompt
from tests.models.harness import CPU, files_of, transformers_logits

BORDER = 24
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 3.0, 8.0],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny Phi-4-mini of transformers, and ours with the same weights."""
    folder = tmp_path_factory.mktemp("phi4")
    reference = make("phi4 mini", original_max_position_embeddings=BORDER, rope_scaling=LONGROPE)
    reference.save_pretrained(folder)
    return reference, load(files_of(folder), torch.float32, CPU)


def generate(reference, token_ids, num_tokens):
    """Continue greedily, each token by a forward pass over all tokens before it, without a cache."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(transformers_logits(reference, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def request(token_ids, num_tokens):
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    return Request("r", tuple(token_ids), sampling)


async def text_of(engine, token_ids, num_tokens=30):
    """The tokens that follow a prompt, and how many tokens of the prompt came from the cache."""
    stream = engine.submit(request(token_ids, num_tokens))
    output = await stream.collect()
    return [token.piece.token_id for token in output.tokens], stream.num_cached_tokens


def test_the_border(models):
    _, decoder = models
    assert decoder.spec.short_context == BORDER


async def test_equal_to_transformers_after_chunks_preemption_and_hits(models):
    """Prompts at and around the border, together in a pool that is too small for all."""
    reference, decoder = models
    prompts = [prompt(length, seed=length) for length in (5, BORDER - 1, BORDER, BORDER + 1, 40, 55)]
    expected = [generate(reference, ids, 30) for ids in prompts]
    async with tiny_engine(
        model=decoder, has_eos=False, token_budget=16, max_num_seqs=6, kv_tokens=160, overcommit=1.0
    ) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(text_of(engine, ids) for ids in prompts))
            assert [tokens for tokens, _ in found] == expected
        assert engine.stats().preemptions_total > 0


async def test_samples_of_one_prompt_at_the_border(models):
    """Some start on the pages of the first one, some after it has given them up."""
    reference, decoder = models
    ids = prompt(BORDER)
    expected = generate(reference, ids, 12)
    async with tiny_engine(model=decoder, has_eos=False, max_num_seqs=2) as engine:
        streams = engine.submit_group([request(ids, 12) for _ in range(5)])
        outputs = await asyncio.gather(*(stream.collect() for stream in streams))
    assert [[token.piece.token_id for token in output.tokens] for output in outputs] == [expected] * 5


async def test_short_and_long_sequences_do_not_share_pages(models):
    reference, decoder = models
    long = prompt(50)
    short = long[:20]
    expected = {len(ids): generate(reference, ids, 4) for ids in (short, long)}
    async with tiny_engine(model=decoder, has_eos=False, page_size=16) as engine:
        for ids, num_cached in ((short, 0), (long, 0), (short, 16), (long, 48)):
            assert await text_of(engine, ids, 4) == (expected[len(ids)], num_cached)
