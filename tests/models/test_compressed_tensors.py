"""Checkpoints of compressed-tensors: which modules have which scheme, and what is refused.

Covers models/formats/compressed_tensors.py.
"""

import pytest
import torch

from models.errors import ModelError
from models.formats.dense import DenseWeights
from models.formats.pack_quantized import PackQuantizedWeights
from models.loader import load
from tests.models.harness import CPU, files_of
from tests.models.packed_int_checkpoints import compare, linears, llama, packed_tensors, quantized, save

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}


def write(model, folder, config, size_of):
    """Pack the linears of a model in place; size_of gives the group size by name, None: left out."""
    tensors = {}
    with torch.no_grad():
        for name, module in linears(model, head=True).items():
            size = size_of(name)
            if size is not None:
                codes, scales, _, values = quantized(module.weight.data, size, False)
                module.weight.data = values
                tensors[name] = packed_tensors(codes, scales, None, None)
    save(model, folder, tensors, config)


def with_group(**changes):
    return CONFIG | {"config_groups": {"group_0": GROUP | changes}}


@pytest.mark.parametrize("ignored", [["lm_head"], "lm_head"], ids=str)
def test_all_linears_but_the_head(ignored, tmp_path):
    model = llama()
    write(model, tmp_path, CONFIG | {"ignore": ignored}, lambda name: None if name == "lm_head" else 64)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.output.weights, DenseWeights)
    assert isinstance(decoder.layers[0].mlp.down.weights, PackQuantizedWeights)


def test_the_head_too(tmp_path):
    model = llama()
    write(model, tmp_path, CONFIG | {"ignore": []}, lambda name: 64)
    assert isinstance(compare(model, tmp_path).output.weights, PackQuantizedWeights)


@pytest.mark.parametrize("target", ["lm_head", "re:.*lm_head"])
def test_a_head_with_a_scheme_of_its_own(target, tmp_path):
    model = llama()
    head = GROUP | {"targets": [target], "weights": WEIGHTS | {"group_size": 32}}
    groups = {"group_0": GROUP | {"targets": ["re:.*layers.*_proj$"]}, "group_1": head}
    config = CONFIG | {"config_groups": groups, "ignore": []}
    write(model, tmp_path, config, lambda name: 32 if name == "lm_head" else 64)
    assert compare(model, tmp_path).output.weights.packing.group_size == 32


def test_a_tied_head_stays_as_the_embedding_is(tmp_path):
    model = llama(tie_word_embeddings=True)
    write(model, tmp_path, CONFIG | {"ignore": []}, lambda name: None if name == "lm_head" else 64)
    assert isinstance(compare(model, tmp_path).output.weights, DenseWeights)


def test_patterns_precede_the_class(tmp_path):
    model = llama()
    downs = GROUP | {"targets": ["re:.*down_proj"], "weights": WEIGHTS | {"group_size": 32}}
    ignored = ["lm_head", "re:model\\.layers\\.1\\.mlp\\.", "model.layers.0.self_attn.o_proj"]
    config = CONFIG | {"config_groups": {"group_0": GROUP, "group_1": downs}, "ignore": ignored}

    def size_of(name):
        if name in ("lm_head", "model.layers.0.self_attn.o_proj") or ".1.mlp." in name:
            return None
        return 32 if name.endswith("down_proj") else 64

    write(model, tmp_path, config, size_of)
    decoder = compare(model, tmp_path)
    assert decoder.layers[0].mlp.down.weights.packing.group_size == 32
    assert isinstance(decoder.layers[1].mlp.down.weights, DenseWeights)
    assert isinstance(decoder.layers[0].attention.output.weights, DenseWeights)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"format": "marlin-24"}, "'marlin-24' .*group_0 .*pack-quantized"),
        (with_group(format="nvfp4-pack-quantized"), r"'nvfp4-pack-quantized' .*NVFP4.*; use an AWQ or GPTQ"),
        (with_group(weights=None), "group_0 .* does not say"),
        (with_group(weights=WEIGHTS | {"num_bits": 3}), "3"),
        (with_group(weights=WEIGHTS | {"group_size": 48}), "48"),
        (with_group(input_activations={"num_bits": 8}), "group_0: input_activations"),
        (with_group(output_activations={"num_bits": 8}), "group_0: output_activations"),
        (with_group(targets=["re:("]), "no pattern"),
        (CONFIG | {"ignore": ["re:("]}, "no pattern"),
        (CONFIG | {"ignore": ["model.layers.0.self_attn.q_proj"]}, "only some of .*k_proj"),
        (CONFIG | {"config_groups": None}, "config_groups"),
        (CONFIG | {"format": ["x"]}, r"in the format '\['x'\]' are not supported"),
        (CONFIG | {"ignore": [None]}, r"'ignore' is \[None\], and not a list of names"),
        (CONFIG | {"ignore": {"lm_head": 1}}, "'ignore' is .*, and not a list of names"),
        (CONFIG | {"sparsity_config": "x"}, "'sparsity_config' of the quantization_config is not a JSON obj"),
        (with_group(targets=[1]), r"'targets' is \[1\], and not a list of names"),
        (with_group(format="int-quantized", input_activations="x"), "group_0: 'input_activations' is 'x'"),
        (with_group(weights=WEIGHTS | {"strategy": "block"}), "'block' is not supported; group and channel"),
        (CONFIG | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (CONFIG | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
    ids=str,
)
def test_what_is_refused(config, message, tmp_path):
    model = llama()
    write(model, tmp_path, config, lambda name: None if name == "lm_head" else 64)
    with pytest.raises(ModelError, match=message):
        load(files_of(tmp_path), torch.float32, CPU)
