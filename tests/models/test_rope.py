"""Frequencies and angles equal to transformers', bit for bit, from either spelling of a configuration.

Covers models/rope_config.py.
"""

import subprocess
import sys

import pytest
import torch
from transformers import Gemma3TextConfig, GlmConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from models.errors import ModelError
from models.families import gemma3
from models.rope import (
    DynamicScaling,
    FactorScaling,
    RopeSpec,
    cos_sin_table,
    inverse_frequencies,
)
from models.rope_config import rope_of

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn ramp": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
}


def hf_config(parameters, **changes):
    values = {"hidden_size": 1024, "num_attention_heads": 8, "max_position_embeddings": 131072, **changes}
    return LlamaConfig(**values, rope_parameters={"rope_theta": 500_000.0, **parameters})


def our_rope(config, layer_type="full_attention"):
    return rope_of(config.to_dict(), config.head_dim, layer_type)


def assert_rows_equal(table, positions, cos, sin):
    """cos and sin [1, num_positions, 2 * num_angles], as transformers repeats them."""
    num_angles = table.shape[2]
    assert table.dtype == torch.float32
    assert torch.equal(table[positions, 0], cos[0, :, :num_angles])
    assert torch.equal(table[positions, 1], sin[0, :, :num_angles])


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_table_equals_transformers(parameters, head_dim):
    config = hf_config(parameters, head_dim=head_dim)
    positions = torch.tensor([0, 1, 2, 100, 4095])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    table = cos_sin_table(our_rope(config), 4096, CPU)
    assert table.shape == (4096, 2, head_dim // 2)
    assert_rows_equal(table, positions, cos, sin)


def longrope(dim, original=32, **parameters):
    """Divisors of every frequency for short and for long contexts."""
    short = [1 + 0.01 * i for i in range(dim // 2)]
    long = [1 + 0.5 * i for i in range(dim // 2)]
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        **parameters,
    }


@pytest.mark.parametrize("parameters", [{}, {"factor": 8.0}, {"attention_factor": 1.3}], ids=str)
def test_longrope(parameters):
    """The length of the sequence decides for all of its positions."""
    config = hf_config(longrope(64, **parameters), head_dim=64, max_position_embeddings=128)
    for length in (31, 32, 33, 128):
        positions = torch.arange(length)
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
        assert_rows_equal(cos_sin_table(our_rope(config), length, CPU), positions, cos, sin)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_partial_rotation(share, kind):
    """Of Phi-4-mini, whose window of pretraining is beside the parameters."""
    dim = int(32 * share)
    parameters = longrope(dim) if kind == "longrope" else {"rope_type": kind}
    del parameters["rope_type"]
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=48,
        partial_rotary_factor=share,
        rope_parameters={"type": kind, **parameters},
    )
    rope = rope_of(config.to_dict(), 32)
    assert rope.dim == dim
    for length in (48, 49):
        positions = torch.arange(length)
        cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
        assert_rows_equal(cos_sin_table(rope, length, CPU), positions, cos, sin)


def test_partial_rotation_of_glm():
    config = GlmConfig(hidden_size=128, num_attention_heads=4, head_dim=20)
    rope = rope_of(config.to_dict(), 20, interleaved=True)
    assert (rope.dim, rope.interleaved) == (10, True)
    positions = torch.arange(40)
    cos, sin = GlmRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert_rows_equal(cos_sin_table(rope, 40, CPU), positions, cos, sin)


@pytest.mark.parametrize(("share", "rotated"), [(0.25, 8), (0.3, 9), (1.0, 32)])
def test_proportional(share, rotated):
    parameters = {"rope_type": "proportional", "partial_rotary_factor": share, "factor": 2.0}
    config = hf_config(parameters, head_dim=64)
    rope = our_rope(config)
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    found, factor = inverse_frequencies(rope, 4096)
    assert rope.dim == 64
    assert (found > 0).sum() == rotated
    assert torch.equal(found, expected)
    assert factor == 1.0


GEMMA3 = {
    "one for each type": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        }
    },
    "older": {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 1e6,
        "rope_local_base_freq": 7e3,
    },
}


@pytest.mark.parametrize("spelling", GEMMA3)
@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_bases_per_layer_type(spelling, layer_type):
    types = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(head_dim=64, num_hidden_layers=2, layer_types=types, **GEMMA3[spelling])
    positions = torch.arange(100)
    cos, sin = Gemma3RotaryEmbedding(config)(torch.zeros(1), positions[None], layer_type)
    written = config.to_dict()
    as_given = {key: value for key, value in written.items() if key != "rope_parameters"} | GEMMA3[spelling]
    for keys in (written, as_given):
        rope = gemma3.spec(keys).layers[layer_type == "full_attention"].attention.rope
        assert_rows_equal(cos_sin_table(rope, 100, CPU), positions, cos, sin)


def test_layer_types_without_rotation():
    config = {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}}
    assert rope_of(config, 8, "full_attention") is None
    assert rope_of(config, 8, "sliding_attention") == RopeSpec(1e4, 8)


@pytest.mark.parametrize("num_positions", [100, 4096, 10_000])
def test_dynamic_scaling_beyond_the_window(num_positions):
    config = hf_config({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=4096)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=num_positions)
    rope = RopeSpec(500_000.0, 128, DynamicScaling(4.0, 4096))
    found, factor = inverse_frequencies(rope, num_positions)
    assert torch.equal(found, expected)
    assert factor == 1.0


def test_older_configurations_say_the_same():
    """rope_theta and rope_scaling, as config.json had them before transformers 5."""
    new = hf_config(LLAMA3).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = 500_000.0
    old["rope_scaling"] = {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}
    assert rope_of(old, 128) == rope_of(new, 128)
    assert rope_of({"rope_scaling": {"type": "default"}}, 128) == RopeSpec(10_000.0, 128)


@pytest.mark.parametrize("dim", [0, 7])
def test_elements_are_rotated_in_pairs(dim):
    with pytest.raises(ModelError, match=f"cannot rotate {dim} elements"):
        RopeSpec(10_000.0, dim)


def test_divisors():
    rope = RopeSpec(10_000.0, 8, FactorScaling((1.0, 2.0, 4.0, 8.0)))
    plain, _ = inverse_frequencies(RopeSpec(10_000.0, 8), 10)
    found, _ = inverse_frequencies(rope, 10)
    assert torch.equal(found, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_wrong_number_of_divisors():
    with pytest.raises(ModelError, match="3 RoPE factors for 4"):
        inverse_frequencies(RopeSpec(10_000.0, 8, FactorScaling((1.0, 2.0, 4.0))), 10)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, "type 'spiral' is not supported"),
        ({"rope_type": "linear"}, "'linear' lacks 'factor'"),
        ({"rope_type": "dynamic", "factor": None}, "'dynamic' lacks 'factor'"),
        ({"type": "llama3", "factor": 8.0}, "'llama3' lacks 'low_freq_factor'"),
        ({"type": "yarn"}, "'yarn' lacks 'factor'"),
        ({"type": "linear", "factor": "2"}, "factor is '2', which is not a number"),
        ({"type": "linear", "factor": -1}, "factor is -1, which is not a number"),
        ({"type": "linear", "factor": 0}, "factor is 0, which is not a number above 0"),
        ({"type": "su"}, "'su' lacks 'short_factor'"),
        ({**longrope(64), "long_factor": [1.0] * 31}, "31 numbers as 'long_factor'; a list of 32"),
        ({**longrope(64), "short_factor": 2.0}, "has 2.0 as 'short_factor'; a list of 32"),
        ({**longrope(64), "short_factor": [0.0] * 32}, "short_factor is 0, which is not a number above 0"),
        (
            {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "parameter 'mrope_section' is not supported",
        ),
        ({"sliding_attention": {"rope_type": "default"}}, "lack layers of type 'full_attention'"),
        ([1.0], "which is not a JSON object"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_read(parameters, message):
    with pytest.raises(ModelError, match=message):
        rope_of({"max_position_embeddings": 4096, "rope_parameters": parameters}, 64)


def test_a_table_of_shapes_only_imports_no_compiler():
    """Arithmetic on the device `meta` imports torch._dynamo and sympy: a second of every start."""
    code = (
        "import sys, torch; from models.rope import RopeSpec, cos_sin_table; before = set(sys.modules); "
        "table = cos_sin_table(RopeSpec(1e4, 8), 32, torch.device('meta')); "
        "print(list(table.shape), len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[32, 2, 4] 0\n", done.stdout
