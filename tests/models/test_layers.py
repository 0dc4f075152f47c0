"""Attention as a layer computes it, in the kinds that a spec can name.

Covers models/layers.py.
"""

import dataclasses

import pytest
import torch

from models.loader import empty_decoder, random_decoder, random_tensors
from models.rope import RopeSpec
from models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from tests.models.harness import CPU, forward_logits

ROPE = RopeSpec(10_000.0, 8)
TOKENS = list(range(3, 43))


def spec_of(*attentions):
    return DecoderSpec(
        vocab_size=50,
        hidden_size=20,
        max_position=64,
        norm=NormSpec(1e-5),
        tie_embeddings=False,
        layers=tuple(LayerSpec(attention, MlpSpec(24)) for attention in attentions),
    )


def attention(rope=ROPE, **changes):
    return AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, rope=rope, **changes)


def logits(*attentions, tokens=TOKENS):
    return forward_logits(random_decoder(spec_of(*attentions), torch.float32, CPU), tokens)


def test_without_rotation_the_order_of_earlier_tokens_is_not_seen():
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    plain, changed = (logits(attention(rope=None), tokens=tokens) for tokens in (TOKENS, swapped))
    torch.testing.assert_close(plain[2:], changed[2:])
    plain, changed = (logits(attention(), tokens=tokens) for tokens in (TOKENS, swapped))
    assert (plain[2:] - changed[2:]).abs().max() > 1e-3


def test_layers_with_equal_specs_share_a_table():
    other = dataclasses.replace(ROPE, theta=500_000.0)
    spec = spec_of(attention(), attention(other), attention(RopeSpec(10_000.0, 8)), attention(None))
    decoder = random_decoder(spec, torch.float32, CPU)
    first, second, third, fourth = (layer.attention._rotary for layer in decoder.layers)
    assert first is third
    assert first is not second
    assert fourth is None


def test_interleaved_pairs_are_a_permutation_of_the_rows_of_q_and_k():
    order = torch.arange(8).view(2, 4).T.reshape(-1)  # 0, 4, 1, 5, ...
    spec = spec_of(attention(dataclasses.replace(ROPE, interleaved=True)))
    decoder = empty_decoder(spec, torch.float32, CPU)
    parameters = decoder.parameters()
    for address, tensor in random_tensors(decoder):
        leaf, name, shape = parameters[address]
        if name in ("q.weight", "k.weight"):
            tensor = tensor.view(-1, 8, 20)[:, order].reshape(shape)
        leaf.fill(name, tensor)
    decoder.finish()
    torch.testing.assert_close(forward_logits(decoder, TOKENS), logits(attention()))


def test_scale_and_softcap():
    usual = logits(attention())
    assert torch.equal(logits(attention(scale=8**-0.5)), usual)
    assert (logits(attention(scale=0.05)) - usual).abs().max() > 1e-4
    torch.testing.assert_close(logits(attention(softcap=1e4)), usual)
    assert (logits(attention(softcap=0.1)) - usual).abs().max() > 1e-4


def test_more_elements_than_a_head_has_cannot_be_rotated():
    with pytest.raises(ValueError, match="10 elements of a head of 8"):
        attention(RopeSpec(10_000.0, 10))
