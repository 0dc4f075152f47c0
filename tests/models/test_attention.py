"""Attention as a layer computes it, in the kinds that a spec can name."""

import dataclasses

import pytest
import torch

from kernels.attention_batch import AttentionBatch
from kernels.kv_layer import KVLayer
from models.errors import ModelError
from models.formats.base import WHOLE, Shard
from models.forward_batch import ForwardBatch
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


def attended(decoder, num_tokens=5):
    """The result of the first layer's attention for random hidden states, before the output projection."""
    attention = decoder.layers[0].attention
    hidden = torch.randn(num_tokens, 20, generator=torch.Generator().manual_seed(3))
    kv = KVLayer(*(torch.zeros(1, 16, 2 // decoder.shard.world, 8) for _ in range(2)))
    batch = AttentionBatch(
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
        num_decode_rows=0,
    )
    forward = ForwardBatch(torch.arange(num_tokens), torch.arange(num_tokens), (batch,))
    return attention.attend(hidden, forward, kv)


def test_clipping_bounds_the_values():
    plain, clipped = (
        attended(random_decoder(spec_of(attention(clip_qkv=bound)), torch.float32, CPU))
        for bound in (0.0, 0.25)
    )
    assert plain.abs().max() > 0.5
    assert 0.2 < clipped.abs().max() <= 0.25


def test_a_large_sink_leaves_no_weight_for_the_values():
    decoder = random_decoder(spec_of(attention(sinks=True)), torch.float32, CPU)
    before = attended(decoder).view(5, 6, 8)
    decoder.layers[0].attention.sinks.fill("sinks", torch.tensor([0.0, 50.0, 0, 0, 0, -50.0]))
    after = attended(decoder).view(5, 6, 8)
    assert after[:, 1].abs().max() < 1e-6
    assert (after[:, 5] - before[:, 5]).abs().max() > 0.1


@pytest.mark.parametrize("changes", [{"sinks": True}, {"qk_norm": "rms"}, {"qk_norm": "layer_norm_per_head"}])
def test_ranks_compute_their_heads(changes):
    spec = spec_of(attention(**changes))
    generator = torch.Generator().manual_seed(5)
    tensors = {
        address: torch.randn(shape, generator=generator)
        for address, (_, _, shape) in empty_decoder(spec, torch.float32, CPU).parameters().items()
    }
    results = []
    for shard in (WHOLE, Shard(0, 2), Shard(1, 2)):
        decoder = empty_decoder(spec, torch.float32, CPU, shard=shard)
        for address, (leaf, name, _) in decoder.parameters().items():
            leaf.fill(name, tensors[address])
        results.append(attended(decoder))
    torch.testing.assert_close(torch.cat(results[1:], 1), results[0])


def test_a_norm_over_all_heads_cannot_be_divided_among_ranks():
    spec = spec_of(attention(qk_norm="rms_of_projection"))
    with pytest.raises(ModelError, match="cannot be divided among ranks"):
        random_decoder(spec, torch.float32, CPU, shard=Shard(0, 2))


def test_more_elements_than_a_head_has_cannot_be_rotated():
    with pytest.raises(ValueError, match="10 elements of a head of 8"):
        attention(RopeSpec(10_000.0, 10))
