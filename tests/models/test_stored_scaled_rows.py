"""Checkpoints with weights of eight bits against transformers' model with the values that they stand for.

Covers models/formats/stored_scaled_rows.py, models/formats/fbgemm_fp8.py and models/formats/smooth_quant.py.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kernels.expert_routing import group_by_expert
from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import WHOLE, LinearShape, Shard
from models.formats.dense import DenseWeights
from models.formats.stored_scaled_rows import StoredScaledRows
from models.loader import load, outline
from models.memory import num_parameters
from tests.models.families import BASE, MOE, NARROW, prompt, randomised
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits
from tests.models.scaled_rows_checkpoints import FP8, LIMITS, Layout, rounded, write
from tests.models.test_parity import TOLERANCE

WEIGHTS = {"num_bits": 8, "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}


def compressed(kind, kind_of_values, strategy, inputs):
    """A configuration of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": WEIGHTS | {"type": kind_of_values, "strategy": strategy},
        "input_activations": inputs and inputs | {"type": kind_of_values},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def modelopt(algorithm="FP8", **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


BF16 = torch.bfloat16
LAYOUTS = {
    "FP8": Layout(
        compressed("float-quantized", "float", "tensor", STATIC), FP8, (1,), BF16, input_scale=(1,)
    ),
    "FP8 dynamic": Layout(
        compressed("float-quantized", "float", "channel", TOKEN), FP8, (-1, 1), BF16, is_dynamic=True
    ),
    "FP8 W8A16": Layout(compressed("naive-quantized", "float", "channel", None), FP8, (-1, 1), BF16),
    "INT8": Layout(
        compressed("int-quantized", "int", "channel", TOKEN), torch.int8, (-1, 1), is_dynamic=True
    ),
    "INT8 static": Layout(
        compressed("int-quantized", "int", "channel", STATIC), torch.int8, (-1, 1), input_scale=(1,)
    ),
    "INT8 W8A16": Layout(compressed("int-quantized", "int", "tensor", None), torch.int8, ()),
    "ModelOpt": Layout(modelopt(), FP8, (), input_scale=()),
    "ModelOpt by channel": Layout(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), FP8, (-1,), is_dynamic=True),
    "FBGEMM": Layout(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.0},
        FP8,
        (-1, 1),
        is_dynamic=True,
    ),
    "SmoothQuant": Layout(
        {"quant_method": "smooth_quant", "quant_dtype": "int8"},
        torch.int8,
        (-1, 1),
        scale_name="scale",
        is_dynamic=True,
    ),
}


def llama(**changes):
    return randomised(LlamaForCausalLM(LlamaConfig(**BASE | changes)))


def compare(model, folder):
    """Compare the logits of a checkpoint with those of the model that was written; return the decoder.

    Where inputs differ in their last bits, one may round to another value of eight bits, which changes all
    that follows: so most of several prompts must be equal, not all.
    """
    decoder = load(files_of(folder), torch.float32, CPU)
    outline(files_of(folder), torch.float32)
    assert num_parameters(decoder) == sum(parameter.numel() for parameter in model.parameters())
    errors = []
    for seed in range(9):
        ids = prompt(12, seed)
        found, expected = forward_logits(decoder, ids, [7, 1, 4]), transformers_logits(model, ids)
        errors.append((found - expected).abs().max() / expected.abs().max())
    errors = torch.stack(errors)
    assert errors.median() < TOLERANCE and errors.max() < 0.1, f"logits differ by {errors.tolist()}"
    return decoder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model(name, tmp_path):
    model = llama()
    write(model, tmp_path, LAYOUTS[name])
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.output.weights, DenseWeights)
    assert isinstance(decoder.layers[0].attention.qkv.weights, StoredScaledRows)
    half = load(files_of(tmp_path), torch.float16, CPU)
    assert half.layers[0].mlp.down.weights.values_dtype == LAYOUTS[name].dtype


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_projections(name, tmp_path):
    sizes = NARROW | {"pad_token_id": 0}
    model = randomised(Phi3ForCausalLM(Phi3Config(**sizes)))
    write(model, tmp_path, LAYOUTS[name])
    compare(model, tmp_path)


@pytest.mark.parametrize("name", ["FP8", "INT8", "ModelOpt"])
def test_experts_are_weight_only(name, tmp_path):
    model = randomised(Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | {"decoder_sparse_step": 1})))
    write(model, tmp_path, LAYOUTS[name])
    compare(model, tmp_path)


@pytest.mark.parametrize("name", ["FP8 dynamic", "INT8 static"])
def test_a_head_and_biases(name, tmp_path):
    model = randomised(Qwen2ForCausalLM(Qwen2Config(**NARROW)))
    layout = LAYOUTS[name]
    layout = Layout(**vars(layout) | {"config": layout.config | {"ignore": []}})
    write(model, tmp_path, layout, skip=lambda name: False)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.output.weights, StoredScaledRows)


@pytest.mark.parametrize("name", ["FP8", "ModelOpt"])
def test_a_tied_head_is_the_embedding(name, tmp_path):
    model = llama(tie_word_embeddings=True)
    write(model, tmp_path, LAYOUTS[name])
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.output.weights, DenseWeights)


def test_scales_of_keys_and_values_beside_those_of_weights(tmp_path):
    model = llama()
    names = [
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale" for layer in range(2) for part in "kv"
    ]
    more = {name: torch.tensor(0.5 + index) for index, name in enumerate(names)}
    write(model, tmp_path, LAYOUTS["ModelOpt"], more=more)
    decoder = load(files_of(tmp_path), torch.float32, CPU, kv_scales=True)
    assert decoder.kv_scales == ((0.5, 1.5), (2.5, 3.5))
    compare(model, tmp_path)


MODULES = [f"model.layers.0.self_attn.{name}_proj" for name in "qk"]
OUTPUTS = {"q": 13, "k": 5}


def made(name, shape, shard=WHOLE, modules=MODULES):
    config = LAYOUTS[name].config
    return stored_format(config)(config, torch.float32, CPU, shard)(modules, shape)


def fill(weights, tensors):
    shapes = weights.parameters()
    for name, tensor in tensors.items():
        weights.fill(name, tensor.reshape(shapes[name]))


def tensors_of(layout, outputs=OUTPUTS, size=37):
    """Tensors of a linear with a bias, and the values of its weight."""
    torch.manual_seed(0)
    tensors, values = {}, []
    for index, (name, features) in enumerate(outputs.items()):
        parts, exact = layout.store(torch.randn(features, size) * 3**index)
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in parts.items()}
        tensors[f"{name}.bias"] = torch.randn(features)
        values.append(exact)
    return tensors, torch.cat(values), torch.cat([tensors[f"{name}.bias"] for name in outputs])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_product_of_odd_sizes(name):
    layout = LAYOUTS[name]
    tensors, values, bias = tensors_of(layout)
    weights = made(name, LinearShape(37, OUTPUTS, bias=True))
    assert weights.parameters().keys() == tensors.keys()
    fill(weights, tensors)
    x = torch.randn(6, 37) * torch.tensor([1, 0.1, 3, 0, 1, 9])[:, None]  # beyond the static scale, too
    expected = layout.rounded_input(x).nan_to_num() @ values.t() + bias
    torch.testing.assert_close(weights.matmul(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("shard", "world"), [("column", 3), ("row", 2)])
def test_ranks_make_the_whole(name, shard, world):
    layout = LAYOUTS[name]
    tensors, values, bias = tensors_of(layout)
    x, found = torch.randn(5, 37), []
    for rank in (Shard(index, world) for index in range(world)):
        weights = made(name, LinearShape(37, OUTPUTS, bias=True, shard=shard), rank)
        fill(weights, tensors)
        part = weights.matmul(x[:, rank.slice(37)] if shard == "row" else x)
        found.append(
            part if shard == "row" else part.split([len(range(n)[rank.slice(n)]) for n in (13, 5)], 1)
        )
    if shard == "row":
        parts = [layout.rounded_input(x[:, Shard(index, world).slice(37)]) for index in range(world)]
        whole, expected = sum(found), torch.cat(parts, 1) @ values.t() + bias
    else:
        whole = torch.cat([torch.cat(parts, 1) for parts in zip(*found, strict=True)], 1)
        expected = layout.rounded_input(x) @ values.t() + bias
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


def test_outputs_with_other_input_scales_have_the_largest():
    layout = LAYOUTS["INT8 static"]
    tensors, values, bias = tensors_of(layout)
    tensors["k.input_scale"] *= 2
    weights = made("INT8 static", LinearShape(37, OUTPUTS, bias=True))
    fill(weights, tensors)
    x = torch.randn(4, 37)
    scale = 10 / LIMITS[torch.int8]
    expected = rounded(x / scale, torch.int8).float() * scale @ values.t() + bias
    torch.testing.assert_close(weights.matmul(x), expected, rtol=1e-5, atol=1e-5)


def test_inputs_with_a_zero_point_are_not_rounded():
    for inputs in (TOKEN, STATIC):
        config = compressed("int-quantized", "int", "channel", inputs | {"symmetric": False})
        weights = stored_format(config)(config, torch.float32, CPU, WHOLE)(MODULES, LinearShape(37, OUTPUTS))
        tensors, values, _ = tensors_of(LAYOUTS["INT8 static" if inputs is STATIC else "INT8"])
        tensors = {key: tensor for key, tensor in tensors.items() if "bias" not in key}
        if inputs is STATIC:
            tensors |= {f"{key}.input_zero_point": torch.ones(1, dtype=torch.int8) for key in OUTPUTS}
        assert weights.parameters().keys() == tensors.keys()
        assert weights.fallback == "activations with zero points are not quantized"
        fill(weights, tensors)
        x = torch.randn(4, 37)
        torch.testing.assert_close(weights.matmul(x), x @ values.t(), rtol=1e-5, atol=1e-5)


def test_a_gpu_without_fp8_multiplies_by_the_weight_alone(monkeypatch):
    monkeypatch.setattr("models.formats.scaled_rows.has_fp8", lambda device: False)
    for name in LAYOUTS:
        tensors, values, bias = tensors_of(LAYOUTS[name])
        weights = made(name, LinearShape(37, OUTPUTS, bias=True))
        fill(weights, tensors)
        is_fp8, is_weight_only = LAYOUTS[name].dtype == FP8, "W8A16" in name
        assert (weights.fallback is not None) == (is_fp8 and not is_weight_only), name
        if is_fp8:
            x = torch.randn(4, 37)
            torch.testing.assert_close(weights.matmul(x), x @ values.t() + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["FP8", "INT8"])
def test_a_grouped_product(name):
    layout = LAYOUTS[name]
    torch.manual_seed(0)
    modules = ["model.layers.0.mlp.experts.0.down_proj"]
    weights = made(name, LinearShape(21, {"": 9}, num_experts=3), modules=modules)
    values = []
    for expert in range(3):
        parts, exact = layout.store(torch.randn(9, 21))
        values.append(exact)
        if layout.input_scale is not None:
            parts["input_scale"] = torch.zeros(1)  # an expert that calibration did not reach
        fill(weights, {f"{expert}.{kind}": tensor for kind, tensor in parts.items()})
    ids = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    x = torch.randn(2, 21)
    found = weights.grouped_matmul(x, group_by_expert(ids, 3))
    expected = torch.stack([x[token] @ values[expert].t() for token in (0, 1) for expert in ids[token]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("q.weight_scale", 0.0, r"q_proj\.weight_scale has 0\.0 for weights that are not 0"),
        ("k.weight_scale", torch.nan, r"layers\.0\.self_attn\.k_proj\.weight_scale has nan"),
        ("k.weight_scale", -1.0, r"k_proj\.weight_scale has -1\.0"),
        ("k.weight_scale", torch.inf, r"k_proj\.weight_scale has inf"),
        ("q.weight_scale", torch.uint8, r"q_proj\.weight_scale holds uint8, and scales are floats"),
        ("q.input_scale", 0.0, r"q_proj\.input_scale has 0\.0"),
        ("k.input_scale", torch.nan, r"k_proj\.input_scale has nan"),
        ("k.weight", torch.nan, r"k_proj\.weight has values that are not numbers"),
        ("k.weight", -torch.nan, r"k_proj\.weight has values that are not numbers"),
        ("k.weight", torch.int8, r"k_proj\.weight holds int8, not float8_e4m3fn"),
        ("q.weight", torch.bfloat16, r"q_proj\.weight holds bfloat16, not float8_e4m3fn"),
        ("q.weight", torch.float8_e5m2, r"q_proj\.weight holds float8_e5m2, not float8_e4m3fn"),
    ],
)
def test_values_that_make_no_sense(parameter, value, message):
    tensors, _, _ = tensors_of(LAYOUTS["FP8"])
    if isinstance(value, torch.dtype):
        tensors[parameter] = tensors[parameter].float().to(value)
    else:
        tensors[parameter].view(-1)[-1] = value
    with pytest.raises(ModelError, match=message):
        fill(made("FP8", LinearShape(37, OUTPUTS, bias=True)), tensors)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scale_of_zero_is_that_of_zeros(name):
    tensors, values, bias = tensors_of(LAYOUTS[name])
    scale = tensors[f"k.{LAYOUTS[name].scale_name}"].view(-1)
    row = 2 if len(scale) > 1 else slice(None)
    for tensor in (scale, tensors["k.weight"], values[13:]):
        tensor[row] = 0
    for order in (tensors, dict(reversed(tensors.items()))):
        weights = made(name, LinearShape(37, OUTPUTS, bias=True))
        fill(weights, order)
        x = torch.randn(4, 37)
        expected = LAYOUTS[name].rounded_input(x) @ values.t() + bias
        torch.testing.assert_close(weights.matmul(x), expected, rtol=1e-5, atol=1e-5)


def test_an_expert_is_named():
    modules = [f"model.layers.0.mlp.experts.0.{name}_proj" for name in ("gate", "up")]
    shape = LinearShape(4, {"gate": 3, "up": 3}, num_experts=12)
    weights = made("FP8", shape, modules=modules)
    with pytest.raises(ModelError, match=r"^model\.layers\.0\.mlp\.experts\.11\.up_proj\.weight_scale has"):
        weights.fill("11.up.weight_scale", -torch.ones(1))
    packed = made("FP8", LinearShape(4, OUTPUTS), modules=["model.layers.0.self_attn.qk_proj"])
    with pytest.raises(ModelError, match=r"^model\.layers\.0\.self_attn\.qk_proj\.weight_scale has"):
        packed.fill("k.weight_scale", -torch.ones(1))


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("FP8", {f"{Q}.weight_scale": None}, rf"lacks {Q}\.weight_scale$"),
        ("ModelOpt", {f"{DOWN}.input_scale": None}, rf"lacks {DOWN}\.input_scale$"),
        (
            "FP8",
            {f"{DOWN}.weight_scale": torch.ones(48, 1)},
            r"weight_scale has the shape \[48, 1\]; .* \[1\]",
        ),
        ("INT8", {f"{DOWN}.weight_scale": torch.ones(1)}, r"weight_scale has the shape \[1\]; .* \[48\]"),
        ("INT8", {f"{DOWN}.weight_scale": torch.ones(48, 2)}, r"the shape \[48, 2\]; .* \[48\]"),
        (
            "INT8",
            {f"{DOWN}.weight_zero_point": torch.ones(48, 1)},
            r"no place for .*down_proj\.weight_zero_point",
        ),
        ("INT8", {f"{Q}.weight": torch.ones(120, 47, dtype=torch.int8)}, r"\[120, 47\]; .* \[120, 48\]"),
        ("FP8", {f"{Q}.weight": torch.ones(120, 48)}, rf"{Q}\.weight holds float32, not float8_e4m3fn"),
        ("SmoothQuant", {f"{Q}.scale": torch.zeros(120, 1)}, rf"{Q}\.scale has 0\.0"),
    ],
)
def test_bad_checkpoints(name, change, message, tmp_path):
    write(llama(), tmp_path, LAYOUTS[name])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | change
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ModelError, match=message):
        load(files_of(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_weights_keep_the_variance_of_their_input(name):
    weights = made(name, LinearShape(256, {"": 400}))
    for seed, parameter in enumerate(weights.parameters()):
        weights.fill(parameter, weights.random(parameter, torch.Generator().manual_seed(seed)))
    assert 0.8 < weights.matmul(torch.randn(50, 256)).std() < 1.2
