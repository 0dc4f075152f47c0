"""What a decoder computes around attention: where norms are, multipliers, the head.

Covers models/decoder.py and models/spec.py.
"""

import pytest
import torch

from models.errors import ModelError
from models.loader import random_decoder, random_tensors
from models.rope import RopeSpec
from models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from tests.models.harness import CPU, forward_logits

RMS = NormSpec(1e-5)
TOKENS = list(range(3, 30))


def spec_of(norms="before", norm=RMS, **changes):
    attention = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=8, rope=RopeSpec(10_000.0, 8))
    layer = LayerSpec(attention, MlpSpec(24), norms)
    fields = {"vocab_size": 50, "hidden_size": 20, "max_position": 64, "tie_embeddings": False}
    return DecoderSpec(norm=norm, layers=(layer, layer), **fields | changes)


def made(**changes):
    return random_decoder(spec_of(**changes), torch.float32, CPU)


def test_each_place_of_norms_has_its_parameters():
    names = {
        norms: [
            address.removeprefix("layers.1.").removesuffix(".weight")
            for address, _ in random_tensors(made(norms=norms))
            if address.startswith("layers.1.") and "norm" in address
        ]
        for norms in ("before", "after", "both", "parallel")
    }
    inputs, outputs = ["attention_norm", "mlp_norm"], ["attention_output_norm", "mlp_output_norm"]
    assert names["before"] == inputs
    assert names["after"] == outputs
    assert sorted(names["both"]) == sorted(inputs + outputs)
    assert names["parallel"] == ["attention_norm"]


@pytest.mark.parametrize("norms", ["before", "after", "both", "parallel"])
def test_the_last_layer_is_finished_for_the_tokens_at_hidden_indices_alone(norms):
    """The parallel layer normalises its input again there, for these tokens."""
    decoder = made(norms=norms)
    whole = forward_logits(decoder, TOKENS)
    torch.testing.assert_close(forward_logits(decoder, TOKENS, [10, 1, 16]), whole)
    indices = torch.tensor([26, 4])
    found = forward_logits(decoder, TOKENS, hidden_indices=indices)
    torch.testing.assert_close(found, whole[indices])


def test_a_layer_adds_nothing_with_a_multiplier_of_0():
    """So the logits are those of the embedding's norm."""
    decoder = made(residual_multiplier=0.0)
    rows = decoder.embedding.weight[TOKENS]
    torch.testing.assert_close(forward_logits(decoder, TOKENS), decoder.logits(decoder.norm(rows)))


def test_logits_are_scaled_before_they_are_capped():
    hidden = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    plain = made().logits(hidden)
    capped = made(logits_scale=0.5, logits_softcap=0.3)
    expected = 0.3 * torch.tanh(plain * 0.5 / 0.3)
    torch.testing.assert_close(capped.logits(hidden), expected)
    out = torch.empty(5, 50)
    assert capped.logits(hidden, out) is out
    torch.testing.assert_close(out, expected)


def test_layer_norm_on_outputs_is_refused():
    for norms in ("after", "both"):
        with pytest.raises(ModelError, match="LayerNorm on the outputs"):
            spec_of(norms, NormSpec(1e-5, "layer"))


@pytest.mark.parametrize(
    "options", [{"kind": "rms", "bias": True}, {"kind": "layer", "fp32_weight": True}], ids=str
)
def test_norms_that_are_not_computed_are_refused(options):
    with pytest.raises(ValueError, match="no norm is computed like this"):
        NormSpec(1e-5, **options)
