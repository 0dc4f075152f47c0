"""Scales of keys and values that checkpoints of other tools have."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.device.kv_cache import KVCache
from engine.device.runner import ModelRunner
from engine.errors import ModelError
from models import errors
from models.loader import load
from tests.models.harness import files_of
from tests.tiny_checkpoint import write_checkpoint

CPU = torch.device("cpu")
SCALES = ((0.25, 0.5), (2.0, 0.125))
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "compressed-tensors on projections": ("k_proj.output_scale", "v_proj.output_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
}


def write(folder, tensors: dict[str, torch.Tensor]):
    """Write a checkpoint with more tensors, by their names below `model.layers`."""
    write_checkpoint(folder)
    file = folder / "model.safetensors"
    more = {f"model.layers.{name}": tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return folder


def scales_of(tool: str) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.self_attn.{name}": torch.tensor([scale] if tool == "ModelOpt" else scale)
        for layer, pair in enumerate(SCALES)
        for name, scale in zip(NAMES[tool], pair, strict=True)
    }


@pytest.mark.parametrize("tool", NAMES)
def test_the_cache_has_the_scales_of_the_checkpoint(tmp_path, tool):
    folder = write(tmp_path, scales_of(tool))
    model = load(files_of(folder), torch.float32, CPU, kv_scales=True)
    layers = KVCache.of(model, 4, 16, "fp8").layers
    assert tuple((layer.key_scale, layer.value_scale) for layer in layers) == SCALES
    assert all(layer.key_scale == 1.0 for layer in KVCache.of(model, 4, 16, "int8").layers)
    assert load(files_of(folder), torch.float32, CPU).kv_scales is None, "they are for fp8 alone"


def test_one_scale_for_keys_and_values(tmp_path):
    folder = write(tmp_path, {f"{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(2)})
    assert load(files_of(folder), torch.float32, CPU, kv_scales=True).kv_scales == ((0.5, 0.5),) * 2


def test_a_checkpoint_without_scales(tmp_path):
    folder = write_checkpoint(tmp_path)
    model = load(files_of(folder), torch.float32, CPU, kv_scales=True)
    assert model.kv_scales is None
    assert all(layer.value_scale == 1.0 for layer in KVCache.of(model, 4, 16, "fp8").layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.self_attn.v_scale": torch.tensor(0.0)}, "1.self_attn.v_scale is 0.0, and a scale is a positive"),
        ({"0.self_attn.k_scale": torch.tensor(torch.nan)}, "0.self_attn.k_scale is nan"),
        ({"0.self_attn.k_scale": torch.tensor(torch.inf)}, "0.self_attn.k_scale is inf"),
        ({"0.self_attn.k_scale": torch.tensor(-1.0)}, "0.self_attn.k_scale is -1.0"),
        (
            {"0.self_attn.k_scale": torch.ones(2)},
            r"0.self_attn.k_scale has the shape \[2\]; one scale for all",
        ),
        ({"0.self_attn.k_scale": torch.tensor(1)}, "0.self_attn.k_scale holds int64, and a scale is a float"),
        ({"1.self_attn.k_scale": None}, "has k_scale of some layers and not of layer 1"),
    ],
)
def test_bad_scales(tmp_path, change, message):
    tensors = scales_of("compressed-tensors") | change
    folder = write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_dtype="fp8", kv_tokens=64, threads=1
    )
    with pytest.raises(ModelError, match=message):
        ModelRunner.load(config, files_of(folder), 16)
    load(files_of(folder), torch.float32, CPU)  # without fp8 they do not matter


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, None),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "has num_bits 8 and type 'int': .* not those of fp8",
        ),
        (
            {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "kv_cache_scheme has num_bits 4 and type 'float'",
        ),
        ({"kv_cache_scheme": "x"}, "kv_cache_scheme is 'x', which is not a JSON object"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, None),
        (
            {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "kv_cache_quant_algo is 'NVFP4': the checkpoint's scales",
        ),
    ],
    ids=str,
)
def test_the_scheme_must_be_fp8(tmp_path, quantization, message):
    """Of a checkpoint of ModelOpt whose weights are not quantized."""
    folder = write(tmp_path, scales_of("ModelOpt"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    if message is None:
        assert load(files_of(folder), torch.float32, CPU, kv_scales=True).kv_scales == SCALES
    else:
        with pytest.raises(errors.ModelError, match=message):
            load(files_of(folder), torch.float32, CPU, kv_scales=True)


def test_scales_far_from_one_are_logged(tmp_path, caplog):
    far = {"0.self_attn.k_scale": torch.tensor(1e-30), "1.self_attn.v_scale": torch.tensor(1e30)}
    folder = write(tmp_path, scales_of("compressed-tensors") | far)
    assert load(files_of(folder), torch.float32, CPU, kv_scales=True).kv_scales is not None
    assert "0.self_attn.k_scale (1e-30), model.layers.1.self_attn.v_scale (1e+30); if" in caplog.text
    assert "0.self_attn.v_scale" not in caplog.text, "it is 0.5"
