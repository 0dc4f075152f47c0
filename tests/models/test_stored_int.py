"""Checkpoints that store integers of 4 or 8 bits against transformers' model with the dequantized weights.

Covers models/formats/stored_int.py, models/formats/stored_parts.py, models/formats/awq.py and
models/formats/gptq.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import WHOLE, LinearShape, Shard
from models.formats.dense import DenseWeights
from models.loader import load
from tests.models.families import MOE, randomised
from tests.models.harness import CPU, files_of
from tests.models.packed_int_checkpoints import (
    AWQ,
    GPTQ,
    SIZES,
    awq_tensors,
    compare,
    gptq_tensors,
    linears,
    llama,
    quantized,
    save,
)


def write(
    model,
    folder,
    config,
    *,
    group_size=64,
    asymmetric=True,
    order=None,
    version=1,
    skip=(),
    head=False,
    bits_of=lambda name: 4,
):
    """Quantize the linears of a model in place and write them in a layout."""
    tensors = {}
    with torch.no_grad():
        for name, module in linears(model, head).items():
            if any(part in name for part in skip):
                continue
            in_features = module.in_features
            size = in_features if group_size == -1 else group_size
            groups = torch.arange(in_features) // size
            if order is not None:
                groups = groups[order(name, in_features)]
            bits = bits_of(name)
            codes, scales, zeros, values = quantized(module.weight.data, group_size, asymmetric, groups, bits)
            module.weight.data = values
            if config["quant_method"] == "awq":
                tensors[name] = awq_tensors(codes, scales, zeros)
            else:
                tensors[name] = gptq_tensors(codes, scales, zeros, groups, version, bits)
    save(model, folder, tensors, config)


@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_awq(group_size, tmp_path):
    model = llama()
    write(model, tmp_path, AWQ | {"group_size": group_size}, group_size=group_size)
    compare(model, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_awq_of_excluded_modules_and_biases(tied, tmp_path):
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "num_attention_heads": 4, "tie_word_embeddings": tied}
    model = randomised(Qwen2ForCausalLM(Qwen2Config(**sizes))).eval()
    skip = ["layers.1.mlp"]
    write(
        model, tmp_path, AWQ | {"group_size": 128, "modules_to_not_convert": skip}, group_size=128, skip=skip
    )
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.layers[1].mlp.down.weights, DenseWeights)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_gptq(version, group_size, asymmetric, tmp_path):
    model = llama()
    config = GPTQ | {"group_size": group_size, "sym": not asymmetric}
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    write(model, tmp_path, config, group_size=group_size, asymmetric=asymmetric, version=version)
    compare(model, tmp_path)


def test_gptq_in_the_order_of_activations(tmp_path):
    model = llama()

    def order(name, size):  # linears with one input have one order
        torch.manual_seed(size + len(name.split(".")[3]))
        return torch.randperm(size)

    write(model, tmp_path, GPTQ | {"desc_act": True}, order=order)
    compare(model, tmp_path)


def test_gptq_orders_that_cannot_be_one_product(tmp_path):
    model = llama()
    write(model, tmp_path, GPTQ, order=lambda name, size: torch.randperm(size))
    with pytest.raises(ModelError, match=r"up_proj: the outputs have different orders of inputs"):
        load(files_of(tmp_path), torch.float32, CPU)


def test_gptq_of_packed_projections(tmp_path):
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    model = randomised(Phi3ForCausalLM(Phi3Config(**sizes | {"pad_token_id": 0}))).eval()
    for config in (GPTQ, AWQ):
        write(model, tmp_path / config["quant_method"], config)
        compare(model, tmp_path / config["quant_method"])


@pytest.mark.parametrize("config", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_a_head_that_is_quantized(config, tmp_path):
    model = llama()
    write(model, tmp_path, config | {"lm_head": True}, head=True)
    decoder = compare(model, tmp_path)
    assert not isinstance(decoder.output.weights, DenseWeights)


@pytest.mark.parametrize("config", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_a_tied_head_stays_as_the_embedding_is(config, tmp_path):
    model = llama(tie_word_embeddings=True)
    write(model, tmp_path, config)
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.output.weights, DenseWeights)


def test_gptq_of_listed_modules(tmp_path):
    model = llama()
    listed = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]]
    config = GPTQ | {"modules_in_block_to_quantize": listed}
    write(model, tmp_path, config, skip=["o_proj", "gate_proj", "up_proj"])
    decoder = compare(model, tmp_path)
    assert isinstance(decoder.layers[0].mlp.gate_up.weights, DenseWeights)


def test_gptq_modules_of_their_own(tmp_path):
    model = llama()
    dynamic = {r"-:.*\.1\.mlp\..*": {}, r"+:.*\.down_proj": {"group_size": 32}}
    skip = ["layers.1.mlp"]
    tensors = {}
    for name, module in linears(model).items():
        if skip[0] in name:
            continue
        size = 32 if "down_proj" in name else 64
        codes, scales, zeros, module.weight.data = quantized(module.weight.data, size, True)
        tensors[name] = gptq_tensors(codes, scales, zeros, torch.arange(module.in_features) // size, 1)
    save(model, tmp_path, tensors, GPTQ | {"dynamic": dynamic})
    compare(model, tmp_path)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("group_size", [16, 64, -1])
def test_gptq_of_eight_bits(version, group_size, tmp_path, caplog):
    model = llama()
    config = GPTQ | {
        "bits": 8,
        "group_size": group_size,
        "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version],
    }
    write(model, tmp_path, config, group_size=group_size, version=version, bits_of=lambda name: 8)
    compare(model, tmp_path)
    lines = [record.message for record in caplog.records if "8 bits" in record.message]
    assert len(lines) == 1
    assert lines[0].endswith(
        "8 linears: there is no product for 8 bits in groups or with zero points: they are kept in float32"
    )


def test_gptq_with_eight_bits_in_some_modules(tmp_path, caplog):
    """As GPTQModel writes them, here in the order of activations."""
    model = llama()
    config = GPTQ | {
        "desc_act": True,
        "dynamic": {r"+:.*\.1\.self_attn\..*": {"bits": 8}},
    }
    write(
        model,
        tmp_path,
        config,
        order=lambda name, size: torch.randperm(size, generator=torch.Generator().manual_seed(size)),
        bits_of=lambda name: 8 if ".1.self_attn." in name else 4,
    )
    decoder = compare(model, tmp_path)
    assert "2 linears: there is no product for 8 bits in groups" in caplog.text
    found = [layer.attention.qkv.weights.packing.bits for layer in decoder.layers]
    assert found == [8 if index == 1 else 4 for index in range(len(found))]


@pytest.mark.parametrize("config", [AWQ, GPTQ, GPTQ | {"bits": 8}], ids=["awq", "gptq", "gptq of 8 bits"])
def test_experts(config, tmp_path):
    """Qwen3-MoE checkpoints have a module for each expert, where transformers has one tensor of all."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 32, "decoder_sparse_step": 1}
    model = randomised(Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE | sizes))).eval()
    model.save_pretrained(tmp_path)
    tensors, group_size = {}, 32

    def store(name, weight):
        groups, bits = torch.arange(weight.shape[1]) // group_size, config["bits"]
        codes, scales, zeros, values = quantized(weight, group_size, True, groups, bits)
        parts = gptq_tensors(codes, scales, zeros, groups, 1, bits)
        if config is AWQ:
            parts = awq_tensors(codes, scales, zeros)
        tensors.update({f"{name}.{kind}": tensor for kind, tensor in parts.items()})
        return values

    with torch.no_grad():
        for name, module in linears(model).items():
            module.weight.data = store(name, module.weight.data)
        for index, layer in enumerate(model.model.layers):
            experts, path = layer.mlp.experts, f"model.layers.{index}.mlp.experts"
            for expert in range(len(experts.down_proj)):
                gate, up = experts.gate_up_proj[expert].chunk(2)
                parts = [store(f"{path}.{expert}.{n}_proj", w) for n, w in (("gate", gate), ("up", up))]
                experts.gate_up_proj[expert] = torch.cat(parts)
                down = experts.down_proj[expert]
                experts.down_proj[expert] = store(f"{path}.{expert}.down_proj", down)
    plain = load_file(tmp_path / "model.safetensors")
    stems = {name.rpartition(".")[0] for name in tensors}
    rest = {name: tensor for name, tensor in plain.items() if name.rpartition(".")[0] not in stems}
    save_file(rest | tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    quantization = config | {"group_size": group_size}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    compare(model, tmp_path)


MODULES = ["model.layers.0.mlp.down_proj"]


def made(config, shape, shard=WHOLE):
    return stored_format(config)(config, torch.float32, CPU, shard)(MODULES, shape)


def fill(weights, parts, prefix=""):
    for name, tensor in parts.items():
        weights.fill(f"{prefix}{name}", tensor)


@pytest.mark.parametrize("config", [AWQ, GPTQ, GPTQ | {"bits": 8}], ids=["awq", "gptq", "gptq of 8 bits"])
@pytest.mark.parametrize(("shard", "world"), [("column", 3), ("row", 2)])
def test_ranks_make_the_whole(config, shard, world):
    torch.manual_seed(0)
    groups, bits = torch.arange(192) // 64, config["bits"]
    if bits == 8:  # which are not kept in the order of activations
        groups = groups[torch.randperm(192)]
    codes, scales, zeros, values = quantized(torch.randn(40, 192), 64, True, groups, bits)
    parts = gptq_tensors(codes, scales, zeros, groups, 1, bits)
    if config is AWQ:
        parts = awq_tensors(codes, scales, zeros)
    x, found = torch.randn(5, 192), []
    for rank in (Shard(index, world) for index in range(world)):
        weights = made(config, LinearShape(192, {"": 40}, shard=shard), rank)
        assert weights.parameters() == {name: tuple(tensor.shape) for name, tensor in parts.items()}
        fill(weights, parts)
        found.append(weights.matmul(x[:, rank.slice(192)] if shard == "row" else x))
    whole = sum(found) if shard == "row" else torch.cat(found, 1)
    torch.testing.assert_close(whole, x @ values.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AWQ | {"version": "gemv"}, "AWQ of version 'gemv' is not supported"),
        (AWQ | {"version": None, "checkpoint_format": "gemv"}, "AWQ of version 'gemv' is not supported"),
        (AWQ | {"zero_point": False}, "AWQ without zero points"),
        (AWQ | {"bits": 8}, "AWQ with 8 bits is not supported; 4 bits are"),
        (GPTQ | {"bits": 3}, "GPTQ with 3 bits is not supported"),
        (GPTQ | {"bits": None}, "GPTQ with None bits"),
        (GPTQ | {"group_size": 0}, "group_size 0 makes no sense"),
        (GPTQ | {"group_size": 16}, "down_proj: groups of 16 "),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "is no pattern"),
        (GPTQ | {"dynamic": {"a": [1]}}, "'dynamic: a' of the quantization_config is not a JSON object"),
        (
            GPTQ | {"modules_in_block_to_quantize": [["a"], 5]},
            "modules_in_block_to_quantize has other values",
        ),
    ],
)
def test_options_that_are_not_supported(config, message):
    with pytest.raises(ModelError, match=message):
        made(config, LinearShape(192, {"": 40})).parameters()


def test_outputs_that_cannot_be_packed():
    for config in (AWQ, GPTQ):
        with pytest.raises(ModelError, match="41 outputs and 192 inputs cannot be"):
            made(config, LinearShape(192, {"": 41})).parameters()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("scales", torch.nan, "down_proj: scales are not finite"),
        ("scales", torch.inf, "down_proj: scales are not finite"),
        ("scales", 0.0, "a scale is 0 in a group whose weights are not"),
        ("g_idx", 1, "g_idx has not 64 inputs in each group"),
        ("qweight", None, "qweight holds torch.float32, and 4 bits are packed in int32"),
    ],
)
def test_values_that_make_no_sense(kind, change, message):
    codes, scales, zeros, _ = quantized(torch.randn(40, 192), 64, True)
    parts = gptq_tensors(codes, scales, zeros, torch.arange(192) // 64, 1)
    if change is None:
        parts[kind] = parts[kind].float()
    else:
        parts[kind].view(-1)[0] = change
    weights = made(GPTQ, LinearShape(192, {"": 40}))
    with pytest.raises(ModelError, match=message):
        fill(weights, parts)


def test_a_scale_of_zero_is_that_of_a_group_of_zeros():
    codes, scales, zeros, values = quantized(torch.randn(40, 192), 64, True)
    codes[3, :64], scales[3, 0], values[3, :64] = zeros[3, 0], 0, 0
    weights = made(AWQ, LinearShape(192, {"": 40}))
    fill(weights, awq_tensors(codes, scales, zeros))
    x = torch.randn(2, 192)
    torch.testing.assert_close(weights.matmul(x), x @ values.t(), rtol=1e-4, atol=1e-4)


def test_order_of_activations_among_ranks_and_experts():
    groups = (torch.arange(192) // 64)[torch.randperm(192)]
    codes, scales, zeros, _ = quantized(torch.randn(40, 192), 64, True, groups)
    parts = gptq_tensors(codes, scales, zeros, groups, 1)
    experts = LinearShape(192, {"": 40}, num_experts=1)
    row = LinearShape(192, {"": 40}, shard="row")
    for shape, shard, prefix in ((experts, WHOLE, "0."), (row, Shard(1, 2), "")):
        weights = made(GPTQ | {"desc_act": True}, shape, shard)
        with pytest.raises(ModelError, match=r"order of activations \(desc_act\) are not supported"):
            fill(weights, parts, prefix)


@pytest.mark.parametrize("config", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_random_weights_keep_the_variance_of_their_input(config):
    weights = made(config, LinearShape(256, {"": 400}))
    for seed, name in enumerate(weights.parameters()):
        weights.fill(name, weights.random(name, torch.Generator().manual_seed(seed)))
    assert 0.8 < weights.matmul(torch.randn(50, 256)).std() < 1.2
