"""Tensors of a checkpoint that fill several parameters.

Covers models/weight_names.py.
"""

import pytest
import torch

from models.errors import ModelError
from models.shapes import SHAPES
from models.weight_names import Packed, Stacked, is_known, names_of, target_of

QKV = tuple(f"layers.*.attention.qkv.{output}" for output in "qkv")
WEIGHT_MAP = {"h.*.qkv": Packed(QKV), "h.*.proj": "layers.*.attention.output"}
WEIGHTS = [f"layers.7.attention.qkv.{output}.weight" for output in "qkv"]
SHAPES_OF_QKV = {address: (rows, 4) for address, rows in zip(WEIGHTS, (6, 2, 2), strict=True)}


def test_a_packed_tensor_is_divided_by_rows():
    tensor = torch.randn(10, 4)
    target = target_of("h.7.qkv.weight", WEIGHT_MAP)
    parts = dict(target.divide("h.7.qkv.weight", tensor, SHAPES["tiny"], SHAPES_OF_QKV))
    assert list(parts) == WEIGHTS
    assert torch.equal(torch.cat(list(parts.values())), tensor)
    assert [len(part) for part in parts.values()] == [6, 2, 2]


def test_biases_are_divided_like_weights():
    addresses = [f"layers.0.attention.qkv.{output}.bias" for output in "qkv"]
    shapes = dict(zip(addresses, ((3,), (1,), (1,)), strict=True))
    target = target_of("h.0.qkv.bias", WEIGHT_MAP)
    parts = dict(target.divide("h.0.qkv.bias", torch.arange(5.0), SHAPES["tiny"], shapes))
    assert [part.tolist() for part in parts.values()] == [[0, 1, 2], [3], [4]]


def test_rows_are_arranged_before_the_division():
    packed = Packed(tuple(WEIGHTS), lambda tensor, spec: tensor.flip(0)[: spec.hidden_size])
    parts = dict(packed.divide("x", torch.arange(10.0)[:, None], SHAPES["tiny"], SHAPES_OF_QKV))
    assert parts[WEIGHTS[0]][:, 0].tolist() == [9, 8, 7, 6, 5, 4]


@pytest.mark.parametrize("shape", [(9, 4), (11, 4), ()], ids=str)
def test_another_number_of_rows_is_refused_by_name(shape):
    target = target_of("h.7.qkv.weight", WEIGHT_MAP)
    with pytest.raises(ModelError, match=r"h\.7\.qkv\.weight has the shape .*; the configuration says 10"):
        list(target.divide("h.7.qkv.weight", torch.ones(shape), SHAPES["tiny"], SHAPES_OF_QKV))


def test_a_packed_bias_the_configuration_does_not_announce():
    target = target_of("h.7.qkv.bias", WEIGHT_MAP)
    with pytest.raises(ModelError, match=r"no place for h\.7\.qkv\.bias$"):
        list(target.divide("h.7.qkv.bias", torch.ones(10), SHAPES["tiny"], SHAPES_OF_QKV))


def test_names_of_an_address_include_packed_tensors():
    assert names_of("layers.3.attention.qkv", WEIGHT_MAP) == ["h.3.qkv"]
    assert names_of("layers.3.attention.output", WEIGHT_MAP) == ["h.3.proj"]


def test_all_tensors_of_a_part_are_left_out():
    weight_map = {"vision.**": None, **WEIGHT_MAP}
    assert is_known("vision.probe", weight_map) and target_of("vision.probe", weight_map) is None
    assert target_of("vision.h.3.qkv.weight", weight_map) is None
    assert target_of("h.7.proj.bias", weight_map) == "layers.7.attention.output.bias"
    assert not is_known("visions.probe", weight_map)
    assert not is_known("vision", WEIGHT_MAP)


EXPERTS = {
    "h.*.experts.up_and_gate": Stacked(
        ("layers.*.mlp.gate_up.*.gate.weight", "layers.*.mlp.gate_up.*.up.weight"),
        lambda part, spec: torch.cat((part[1::2], part[::2])),
    )
}


def test_a_stack_of_experts_is_divided_by_its_whole_name():
    stack = torch.randn(3, 8, 5)
    shapes = {f"layers.4.mlp.gate_up.{e}.{half}.weight": (4, 5) for e in range(3) for half in ("gate", "up")}
    target = target_of("h.4.experts.up_and_gate", EXPERTS)
    parts = dict(target.divide("h.4.experts.up_and_gate", stack, SHAPES["tiny"], shapes))
    assert list(parts) == list(shapes)
    assert torch.equal(parts["layers.4.mlp.gate_up.2.up.weight"], stack[2, ::2])
    with pytest.raises(ModelError, match=r"no place for h\.4\.experts\.up_and_gate\[3\]$"):
        dict(target.divide("h.4.experts.up_and_gate", torch.randn(4, 8, 5), SHAPES["tiny"], shapes))
    assert is_known("h.4.experts.up_and_gate", EXPERTS)
    assert not is_known("h.4.experts.up_and_gate.weight.bias", EXPERTS)


def test_one_scale_of_a_packed_tensor_is_that_of_each_part():
    addresses = [f"layers.0.attention.qkv.{output}.weight_scale" for output in "qkv"]
    target = target_of("h.0.qkv.weight_scale", WEIGHT_MAP)
    scale = torch.tensor(0.5)
    parts = target.divide("h.0.qkv.weight_scale", scale, SHAPES["tiny"], dict.fromkeys(addresses, (1,)))
    assert list(parts) == [(address, scale) for address in addresses]


@pytest.mark.parametrize("name", ["k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale"])
def test_scales_of_quantized_keys_and_values_are_not_loaded(name):
    assert is_known(f"model.layers.3.self_attn.{name}", WEIGHT_MAP)
    assert target_of(f"model.layers.3.self_attn.{name}", WEIGHT_MAP) is None
    assert not is_known(f"model.layers.3.self_attn.{name.replace('_scale', '_scales')}", WEIGHT_MAP)
