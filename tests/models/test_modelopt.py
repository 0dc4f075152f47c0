"""Checkpoints of ModelOpt: where their options are, which modules are left out, and what is refused.

Covers models/formats/modelopt.py.
"""

import json

import pytest
import torch

from models.errors import ModelError
from models.formats.dense import DenseWeights
from models.formats.modelopt import stored
from models.formats.stored_scaled_rows import StoredScaledRows
from models.loader import load, outline
from tests.models.harness import CPU, files_of
from tests.models.scaled_rows_checkpoints import Layout, write
from tests.models.test_stored_scaled_rows import LAYOUTS, compare, llama, modelopt

IN_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def write_beside(model, folder, options):
    """Write options to hf_quant_config.json in place of config.json."""
    write(model, folder, LAYOUTS["ModelOpt"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(options))


def test_options_in_a_file_of_their_own(tmp_path):
    model = llama()
    write_beside(model, tmp_path, IN_FILE)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.layers[0].mlp.down.weights, StoredScaledRows)
    assert outline(files_of(tmp_path), torch.float32).quantization == "modelopt"


def test_config_json_precedes_the_file(tmp_path):
    model = llama()
    write(model, tmp_path, LAYOUTS["ModelOpt"])
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    compare(model, tmp_path)


def test_a_file_that_is_no_json(tmp_path):
    write_beside(llama(), tmp_path, IN_FILE)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json cannot be read"):
        load(files_of(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("excluded", ["model.layers.1.self_attn", "*layers.1.self_attn*", "model.layers.1*"])
def test_excluded_modules(excluded, tmp_path):
    model = llama()

    def skip(name):
        return name == "lm_head" or ".1.self_attn" in name or (excluded.endswith("1*") and ".1.mlp" in name)

    config = modelopt(ignore=["lm_head", excluded])
    write(model, tmp_path, Layout(**vars(LAYOUTS["ModelOpt"]) | {"config": config}), skip=skip)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.layers[1].attention.qkv.weights, DenseWeights)
    assert isinstance(decoder.layers[0].attention.qkv.weights, StoredScaledRows)


def test_half_of_a_fused_linear_cannot_be_excluded(tmp_path):
    config = modelopt(ignore=["*.q_proj", "lm_head"])
    write(llama(), tmp_path, Layout(**vars(LAYOUTS["ModelOpt"]) | {"config": config}))
    with pytest.raises(ModelError, match=r"only some of .*q_proj"):
        load(files_of(tmp_path), torch.float32, CPU)


def test_weights_in_16_bits_with_quantized_keys_and_values(tmp_path):
    model = llama()
    names = [
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale" for layer in range(2) for part in "kv"
    ]
    config = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "ignore": []}
    write(
        model,
        tmp_path,
        Layout(**vars(LAYOUTS["ModelOpt"]) | {"config": config}),
        skip=lambda name: True,
        more={name: torch.tensor(0.5) for name in names},
    )
    compare(model, tmp_path)
    assert load(files_of(tmp_path), torch.float32, CPU, kv_scales=True).kv_scales == ((0.5, 0.5),) * 2


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        *((name, r"\(NVFP4, .*\) is not supported; use an AWQ or GPTQ") for name in ("NVFP4", "nvfp4_awq")),
        *(
            (name, "is not supported; FP8 and FP8_PER_CHANNEL_PER_TOKEN")
            for name in ("W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION", "w4a16_awq")
        ),
    ],
)
def test_algorithms_that_are_not_supported(algorithm, reason):
    message = rf"ModelOpt's algorithm '{algorithm.upper()}' {reason}"
    for config in (modelopt(algorithm), {"quantization": {"quant_algo": algorithm}}):
        with pytest.raises(ModelError, match=message):
            stored(config, torch.float32, CPU, None)
