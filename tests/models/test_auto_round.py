"""Checkpoints of AutoRound against transformers' model with the dequantized weights.

Covers models/formats/auto_round.py.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import WHOLE, LinearShape
from models.formats.dense import DenseWeights
from models.loader import load
from tests.models.harness import CPU, files_of
from tests.models.packed_int_checkpoints import (
    awq_tensors,
    compare,
    gptq_tensors,
    linears,
    llama,
    quantized,
    save,
)

CONFIG = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 64,
    "sym": False,
    "data_type": "int",
    "block_name_to_quantize": "model.layers",
    "autoround_version": "0.12.3",
}
OLD = {key: value for key, value in CONFIG.items() if key not in ("packing_format", "block_name_to_quantize")}


def write(model, folder, config, version=1, options_of=lambda name: (4, 64), drop="g_idx"):
    """Quantize linears of a model in place, by bits and group size (None: not), and write them."""
    tensors = {}
    with torch.no_grad():
        for name, module in linears(model, head=True).items():
            bits, size = options_of(name) if name != "lm_head" or "lm_head" in str(config) else (16, 0)
            if bits == 16:
                continue
            groups = torch.arange(module.in_features) // size
            codes, scales, zeros, module.weight.data = quantized(module.weight.data, size, True, bits=bits)
            if version is None:
                tensors[name] = awq_tensors(codes, scales, zeros)
            else:
                tensors[name] = gptq_tensors(codes, scales, zeros, groups, version, bits)
                tensors[name].pop(drop, None)
    save(model, folder, tensors, config)


@pytest.mark.parametrize(
    ("config", "version", "drop"),
    [
        (CONFIG, 1, "g_idx"),
        (CONFIG | {"packing_format": "auto_round:gptqmodel"}, 2, "g_idx"),
        (CONFIG | {"packing_format": "auto_round"}, 2, "g_idx"),
        (CONFIG | {"packing_format": "auto_round:auto_awq"}, None, "g_idx"),
        (CONFIG | {"packing_format": None, "backend": "auto"}, 1, "g_idx"),
        (OLD | {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, 1, None),
        (OLD | {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, 2, "g_idx"),
        (OLD | {"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"}, 2, None),
        (CONFIG, 1, None),
    ],
    ids=lambda value: (
        value.get("packing_format") or value.get("backend") if isinstance(value, dict) else None
    ),
)
def test_packings(config, version, drop, tmp_path, caplog):
    model = llama()
    write(model, tmp_path, config, version, drop=drop)
    assert isinstance(compare(model, tmp_path).output.weights, DenseWeights)
    is_guessed = config.get("backend") == "auto"
    assert ("8 linears: the configuration has no packing_format: it is" in caplog.text) == is_guessed


def test_a_scattered_order_is_refused(tmp_path):
    write(llama(), tmp_path, CONFIG, drop=None)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.g_idx"][0] = 1
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"no place for model\.layers\.1\.mlp\.down_proj\.g_idx$"):
        load(files_of(tmp_path), torch.float32, CPU)


def test_options_of_modules(tmp_path, caplog):
    """By name, by pattern, of 16 and of 8 bits, and of the head; a name is no pattern."""
    model = llama()
    extra = {
        "lm_head": {"bits": 4, "group_size": 32, "data_type": "int"},
        "model.layers.0.self_attn.o_proj": {"bits": 16, "data_type": "float"},
        "model.layers.1.mlp.gate": {"bits": 16, "data_type": "float"},  # not gate_proj
        "model.layers.1.self_attn.o_proj": {"group_size": 32},
        r".*layers\.1\.self_attn.*": {"bits": 8, "group_size": 32},
    }

    def options_of(name):
        if name.endswith("o_proj"):
            return (16, 0) if ".0." in name else (4, 32)
        return (8, 32) if ".1.self_attn." in name else (4, 32 if name == "lm_head" else 64)

    write(model, tmp_path, CONFIG | {"extra_config": extra}, 1, options_of)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.layers[0].attention.output.weights, DenseWeights)
    assert decoder.output.weights.packing.group_size == 32
    assert "1 linears: there is no product for 8 bits in groups" in caplog.text


@pytest.mark.parametrize("blocks", ["model.layers.0", [["model.layers.0"]], ["model.layers.0."]])
def test_blocks_that_are_quantized(blocks, tmp_path):
    model = llama()
    config = CONFIG | {"block_name_to_quantize": blocks}
    write(model, tmp_path, config, options_of=lambda name: (4, 64) if ".layers.0." in name else (16, 0))
    compare(model, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor'"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format 'auto_round:fp8_static'"),
        ({"data_type": "mx_fp"}, "the data_type 'mx_fp' is not supported"),
        ({"data_type": "nv_fp"}, r"'nv_fp' \(NVFP4, .*\) is not supported; use an AWQ or GPTQ"),
        ({"act_bits": 8}, "activations of 8 bits"),
        ({"act_bits": "8"}, "activations of '8' bits"),
        ({"data_type": ["int"]}, "the data_type .* is not supported"),
        ({"extra_config": {"lm_head": "x"}}, "'extra_config: lm_head' of the quantization_config is not a"),
        ({"extra_config": "x"}, "'extra_config' of the quantization_config is not a JSON object"),
        ({"bits": 2}, "AutoRound with 2 bits is not supported; 4 and 8 bits are"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "8 bits is not supported; 4 bits are"),
        ({"extra_config": {"*": {}}}, "no pattern"),
        ({"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}}, "only some of .*q_proj"),
        ({"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 8}}}, "different bits or group sizes"),
    ],
)
def test_what_is_refused(changes, message, tmp_path):
    model = llama()
    write(model, tmp_path, CONFIG | changes)
    with pytest.raises(ModelError, match=message):
        load(files_of(tmp_path), torch.float32, CPU)


def test_a_head_is_dense_by_default():
    make = stored_format(CONFIG)(CONFIG, torch.float32, CPU, WHOLE)
    assert isinstance(make(["lm_head"], LinearShape(64, {"": 8})), DenseWeights)
