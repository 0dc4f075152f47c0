"""Descriptions of architectures, read from registry and specs."""

from dataclasses import replace

from models.features import features_of, supported
from models.shapes import SHAPES
from models.spec import NormSpec


def test_llamas_layers_have_no_features():
    assert features_of(SHAPES["smollm2-135m"]) == {}


def test_what_differs_from_the_defaults_is_named_with_its_layers():
    spec = SHAPES["llama-8b"]
    first, *others = spec.layers
    attention = replace(first.attention, window=512, qk_norm="rms", rope=None)
    mlp = replace(first.mlp, activation="gelu_tanh", gated=False)
    changed = replace(
        spec,
        layers=(replace(first, attention=attention, mlp=mlp, norms="parallel"), *others),
        norm=NormSpec(1e-5, kind="layer", bias=True),
        logits_scale=0.0625,
    )
    assert features_of(changed) == {
        "decoder": ("logits scale 0.0625",),
        "norm": ("layer", "bias"),
        "layer": ("norms parallel (1 of 32 layers)",),
        "attention": (
            "no rotation (1 of 32 layers)",
            "window 512 (1 of 32 layers)",
            "qk norm rms (1 of 32 layers)",
        ),
        "mlp": ("activation gelu tanh (1 of 32 layers)", "not gated (1 of 32 layers)"),
        "rope": ("llama3 scaling (31 of 32 layers)",),
    }


def test_a_part_of_the_rotation_is_a_feature():
    spec = SHAPES["smollm2-135m"]
    layer = spec.layers[0]
    rope = replace(layer.attention.rope, dim=16)
    spec = replace(spec, layers=(replace(layer, attention=replace(layer.attention, rope=rope)),))
    assert features_of(spec) == {"attention": ("rotates 16 of 64 elements",)}


def test_every_registered_architecture_is_listed():
    """Those that transformers has are described by its default configuration."""
    architectures = {entry.name: entry for entry in supported().architectures}
    assert architectures["LlamaForCausalLM"].features == {}
    assert architectures["LlamaForCausalLM"].gguf_names == ("llama",)
    assert architectures["LlamaForCausalLM"].has_scores
    assert architectures["MistralForCausalLM"].features == {"attention": ("window 4096",)}
    assert architectures["Qwen3ForCausalLM"].features == {"attention": ("qk norm rms",)}
    assert not any(name.endswith("ForSequenceClassification") for name in architectures)
