"""Weights of eight bits of compressed-tensors: which schemes are read, and modules with schemes of their own.

Covers models/formats/naive_quantized.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.formats.base import WHOLE, LinearShape
from models.formats.dense import DenseWeights
from models.formats.fp8_blocks import BlockWeights
from models.formats.naive_quantized import scheme
from models.loader import load
from tests.models.harness import CPU, files_of
from tests.models.scaled_rows_checkpoints import write
from tests.models.test_stored_scaled_rows import LAYOUTS, STATIC, TOKEN, WEIGHTS, compare, llama

FP8_WEIGHTS = WEIGHTS | {"type": "float", "strategy": "tensor"}
INT8_WEIGHTS = WEIGHTS | {"type": "int", "strategy": "channel"}


def parameters(weights, inputs):
    """Return the tensors of a linear, and what its products do with their inputs."""
    made = scheme(weights, torch.float32, CPU, WHOLE, inputs)(["m"], LinearShape(5, {"": 3}))
    return made.parameters(), made._storage.inputs


@pytest.mark.parametrize(
    ("weights", "inputs", "scale", "more", "kind"),
    [
        (FP8_WEIGHTS, None, (1,), (), "unquantized"),
        (FP8_WEIGHTS, STATIC | {"type": "float"}, (1,), ("input_scale",), "static"),
        (FP8_WEIGHTS, STATIC | {"type": "float", "strategy": None}, (1,), ("input_scale",), "static"),
        (FP8_WEIGHTS | {"strategy": None}, TOKEN | {"type": "float"}, (1,), (), "token"),
        (FP8_WEIGHTS, TOKEN | {"type": "float", "strategy": "tensor"}, (1,), (), "token"),
        (INT8_WEIGHTS, TOKEN, (3,), (), "token"),
        (INT8_WEIGHTS | {"strategy": None, "group_size": -1}, TOKEN | {"strategy": None}, (3,), (), "token"),
        (INT8_WEIGHTS, TOKEN | {"symmetric": False}, (3,), (), "unquantized"),
        (
            INT8_WEIGHTS,
            STATIC | {"symmetric": False},
            (3,),
            ("input_scale", "input_zero_point"),
            "unquantized",
        ),
    ],
)
def test_tensors_of_a_scheme(weights, inputs, scale, more, kind):
    expected = {"weight": (3, 5), "weight_scale": scale} | dict.fromkeys(more, (1,))
    assert parameters(weights, inputs) == (expected, kind)


@pytest.mark.parametrize(
    ("weights", "inputs", "message"),
    [
        ({"type": "posit"}, None, "weights of type 'posit' are not supported; float and int are"),
        ({"num_bits": 4}, None, "weights of 4 bits are not supported; eight bits are"),
        (
            {"strategy": "group", "group_size": 128},
            None,
            "strategy 'group' are not supported; channel, tensor",
        ),
        ({"strategy": None, "group_size": 128}, None, "the strategy 'group' are not supported"),
        ({"strategy": "block"}, TOKEN, r"blocks are supported for fp8 in \[128, 128\] with dynamic"),
        ({"symmetric": False}, None, "weights of eight bits with zero points are not supported"),
        ({}, TOKEN | {"num_bits": 4}, "input_activations of 4 bits are not supported"),
        ({}, TOKEN | {"type": "float"}, "weights of type 'int' with input_activations of another"),
        ({}, TOKEN | {"strategy": "group"}, "input_activations with the strategy 'group' are not supported"),
        ({}, STATIC | {"strategy": "channel"}, "input_activations with the strategy 'channel'"),
        ({}, TOKEN | {"dynamic": False}, "input_activations with the strategy 'token'"),
    ],
)
def test_options_that_are_not_supported(weights, inputs, message):
    with pytest.raises(ModelError, match=message):
        parameters(INT8_WEIGHTS | weights, inputs)


BLOCK_WEIGHTS = WEIGHTS | {"type": "float", "strategy": "block", "block_structure": [128, 128]}
BLOCK_INPUTS = TOKEN | {"type": "float", "strategy": "group", "group_size": 128}


def test_blocks():
    torch.manual_seed(0)
    size, outputs, values = 200, {"q": 150, "k": 70}, []
    made = scheme(BLOCK_WEIGHTS, torch.float32, CPU, WHOLE, BLOCK_INPUTS)(
        ["q", "k"], LinearShape(size, outputs)
    )
    for name, features in outputs.items():
        weight = torch.randn(features, size).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-features // 128), 2) + 0.5
        made.fill(f"{name}.weight", weight)
        made.fill(f"{name}.weight_scale", scale)
        wide = scale.repeat_interleave(128, 0)[:features].repeat_interleave(128, 1)[:, :size]
        values.append(weight.float() * wide)
    assert isinstance(made, BlockWeights)
    x = torch.randn(5, size)
    groups = torch.nn.functional.pad(x, (0, 56)).view(5, 2, 128)
    scale = groups.abs().amax(2, keepdim=True) / 448
    x = ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(5, 256)[:, :size]
    torch.testing.assert_close(made.matmul(x), x @ torch.cat(values).t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("weights", "inputs"),
    [
        ({}, None),
        ({"block_structure": [64, 64]}, BLOCK_INPUTS),
        ({"num_bits": 4}, BLOCK_INPUTS),
        ({}, BLOCK_INPUTS | {"group_size": 64}),
        ({}, BLOCK_INPUTS | {"dynamic": False}),
    ],
)
def test_blocks_that_are_not_supported(weights, inputs):
    with pytest.raises(ModelError, match="blocks are supported for fp8"):
        scheme(BLOCK_WEIGHTS | weights, torch.float32, CPU, WHOLE, inputs)


def test_modules_with_schemes_of_their_own(tmp_path):
    """Down projections in fp8, the rest in int8, and a layer's attention in 16 bits."""
    model = llama()

    def left_out(name):
        return name == "lm_head" or ".1.self_attn" in name

    write(model, tmp_path / "down", LAYOUTS["FP8"], skip=lambda name: "down_proj" not in name)
    write(model, tmp_path, LAYOUTS["INT8"], skip=lambda name: left_out(name) or "down_proj" in name)
    path = tmp_path / "model.safetensors"
    down = {
        name: tensor
        for name, tensor in load_file(tmp_path / "down" / path.name).items()
        if "down_proj" in name
    }
    save_file(load_file(path) | down, path)
    groups = {
        name: LAYOUTS[layout].config["config_groups"]["group_0"]
        | {"format": LAYOUTS[layout].config["format"]}
        for name, layout in (("group_0", "INT8"), ("group_1", "FP8"))
    }
    groups["group_1"]["targets"] = ["re:.*down_proj$"]
    quantization = LAYOUTS["INT8"].config | {
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head", "re:.*1.self_attn.*"],
    }
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    decoder = compare(model, tmp_path)
    assert decoder.layers[1].mlp.down.weights.values_dtype == torch.float8_e4m3fn
    assert decoder.layers[1].mlp.gate_up.weights.values_dtype == torch.int8
    assert isinstance(decoder.layers[1].attention.qkv.weights, DenseWeights)


def test_a_configuration_under_its_older_key(tmp_path):
    model = llama()
    write(model, tmp_path, LAYOUTS["INT8"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["compression_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    compare(model, tmp_path)


def test_the_group_is_named(tmp_path):
    layout = LAYOUTS["INT8"]
    write(llama(), tmp_path, layout)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "group"
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"group_0: weights of eight bits with the strategy 'group'"):
        load(files_of(tmp_path), torch.float32, CPU)
