"""FP8 checkpoints of blocks or whole tensors against transformers' model with the values they stand for.

Covers models/formats/fp8_blocks.py and what models/formats/fp8.py reads.
"""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from models.errors import ModelError
from models.formats import stored_format
from models.formats.base import WHOLE, LinearShape, Shard
from models.formats.dense import DenseWeights
from models.formats.fp8_blocks import BlockWeights
from models.loader import load, outline
from tests.models.families import BASE, MOE, prompt, randomised
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits
from tests.models.scaled_rows_checkpoints import Layout, write
from tests.models.test_parity import TOLERANCE

FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# No size is a multiple of 128; queries, keys and values have other numbers of blocks.
SIZES = {**BASE, "hidden_size": 204, "intermediate_size": 328, "head_dim": 36}
MODULES = ["model.layers.0.mlp.down_proj"]


class Blocks(Layout):
    """The layout of official FP8 checkpoints."""

    def __init__(self, scale_dtype: torch.dtype = torch.float32, **config: object) -> None:
        super().__init__(BLOCKS | config, FP8, (), scale_dtype, is_dynamic=True)

    def store(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = torch.stack(
            [torch.stack([b.abs().amax() for b in rows.split(128, 1)]) for rows in weight.split(128)]
        )
        if self.scale_dtype == torch.float8_e8m0fnu:
            scale = (scale / 448).log2().ceil().exp2() * 448
        scale = (scale / 448).to(self.scale_dtype)
        wide = expanded(scale.float(), weight.shape)
        values = (weight / wide).clamp(-448, 448).to(FP8)
        return {"weight": values, "weight_scale_inv": scale}, values.float() * wide

    def rounded_input(self, x: Tensor) -> Tensor:
        return torch.cat([super(Blocks, self).rounded_input(part) for part in x.split(128, -1)], -1)


def expanded(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each value of a weight of this shape."""
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def made_model(model_class: type, config_class: type, **changes: object) -> nn.Module:
    torch.manual_seed(0)
    config = config_class(**SIZES | changes)
    config._attn_implementation = "eager"
    return randomised(model_class(config)).eval()


def compare(model: nn.Module, folder, tolerance: float = TOLERANCE):
    """Compare the logits of a checkpoint with those of the rounded model; return the decoder."""
    decoder = load(files_of(folder), torch.float32, CPU)
    outline(files_of(folder), torch.float32)
    ids = prompt(40)
    expected = transformers_logits(model, ids)
    for chunks in (None, [17, 1, 22], [1] * 40):
        found = forward_logits(decoder, ids, chunks)
        # Sums in another order now and then round an input to its neighbour, 6 % away.
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < tolerance, f"logits differ by {error:.1e}"
    return decoder


ROUNDED = 2e-2


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_llama(scale_dtype, tmp_path):
    model = made_model(LlamaForCausalLM, LlamaConfig)
    config = {"scale_fmt": "ue8m0"} if scale_dtype == torch.float8_e8m0fnu else {}
    write(model, tmp_path, Blocks(scale_dtype, **config))
    decoder = compare(model, tmp_path, ROUNDED)
    assert isinstance(decoder.output.weights, DenseWeights)
    assert isinstance(decoder.layers[0].mlp.down.weights, BlockWeights)


def test_excluded_modules_and_biases(tmp_path):
    model = made_model(Qwen3ForCausalLM, Qwen3Config, attention_bias=True, tie_word_embeddings=True)
    skip = ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.o_proj"]
    layout = Blocks(modules_to_not_convert=[*skip, "model.layers.0.input_layernorm"])
    write(model, tmp_path, layout, skip=lambda name: any(part in name for part in skip))
    decoder = compare(model, tmp_path, ROUNDED)
    assert isinstance(decoder.layers[1].mlp.down.weights, DenseWeights)
    assert isinstance(decoder.layers[0].attention.output.weights, DenseWeights)
    assert isinstance(decoder.layers[1].attention.output.weights, BlockWeights)


def test_experts(tmp_path):
    model = made_model(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        **{key: MOE[key] for key in ("num_experts", "num_experts_per_tok")},
        moe_intermediate_size=140,
        decoder_sparse_step=1,
    )
    write(model, tmp_path, Blocks())
    compare(model, tmp_path, ROUNDED)


def test_packed_projections(tmp_path):
    """Their outputs are whole blocks: other ones could not be told apart in the scale."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
    model = made_model(Phi3ForCausalLM, Phi3Config, **sizes, pad_token_id=0)
    write(model, tmp_path, Blocks())
    compare(model, tmp_path, ROUNDED)


def test_in_float16(tmp_path):
    model = made_model(LlamaForCausalLM, LlamaConfig)
    write(model, tmp_path, Blocks())
    ids = prompt(10)
    expected = transformers_logits(model, ids)
    found = forward_logits(load(files_of(tmp_path), torch.float16, CPU), ids)
    # Rounding to 16 bits moves an input in a hundred to the next value of fp8, 6 % away, in each product.
    error = ((found.float() - expected).norm() / expected.norm()).item()
    assert error < 0.15, f"logits differ by {error:.1e}"


TENSOR = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(TENSOR | {"activation_scheme": "static"}, FP8, (), input_scale=()),
        Layout(TENSOR | {"activation_scheme": "dynamic"}, FP8, (1,), is_dynamic=True),
        Layout(
            TENSOR | {"activation_scheme": "dynamic", "weight_block_size": None},
            FP8,
            (),
            torch.bfloat16,
            "weight_scale_inv",
            is_dynamic=True,
        ),
    ],
    ids=["AutoFP8, static", "AutoFP8, dynamic", "transformers"],
)
def test_scales_of_whole_tensors(layout, tmp_path):
    model = made_model(LlamaForCausalLM, LlamaConfig)
    write(model, tmp_path, layout)
    compare(model, tmp_path, ROUNDED)


def test_static_activations_of_transformers(tmp_path):
    model = made_model(LlamaForCausalLM, LlamaConfig)
    config = TENSOR | {"activation_scheme": "static", "weight_block_size": None}
    write(model, tmp_path, Layout(config, FP8, (), scale_name="weight_scale_inv", input_scale=()))
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("input_scale", "activation_scale"): t for name, t in load_file(path).items()}
    save_file(tensors, path)
    compare(model, tmp_path, ROUNDED)


def test_ignored_layers(tmp_path):
    model = made_model(LlamaForCausalLM, LlamaConfig)
    config = TENSOR | {"activation_scheme": "dynamic", "ignored_layers": ["model.layers.1.mlp.down_proj"]}
    layout = Layout(config, FP8, (1,), is_dynamic=True)
    write(model, tmp_path, layout, skip=lambda name: name == "lm_head" or name.endswith("1.mlp.down_proj"))
    assert isinstance(compare(model, tmp_path, ROUNDED).layers[1].mlp.down.weights, DenseWeights)


def made(config, shape, shard=WHOLE):
    return stored_format(config)(config, torch.float32, CPU, shard)(MODULES, shape)


@pytest.mark.parametrize(
    ("shard", "world", "inputs"), [("column", 3, 200), ("column", 2, 384), ("row", 2, 512)]
)
def test_ranks_make_the_whole(shard, world, inputs):
    torch.manual_seed(0)
    parts, values = Blocks().store(torch.randn(296, inputs))
    for tensor in (parts["weight"][128:256, :128], values[128:256, :128], parts["weight_scale_inv"][1, :1]):
        tensor.zero_()  # a block of zeros may have the scale 0
    x, found = torch.randn(5, inputs), []
    for rank in (Shard(index, world) for index in range(world)):
        weights = made(BLOCKS, LinearShape(inputs, {"": 296}, shard=shard), rank)
        assert weights.parameters() == {name: tuple(tensor.shape) for name, tensor in parts.items()}
        for name, tensor in parts.items():
            weights.fill(name, tensor)
        found.append(weights.matmul(x[:, rank.slice(inputs)] if shard == "row" else x))
    whole = sum(found) if shard == "row" else torch.cat(found, 1)
    torch.testing.assert_close(whole, Blocks().rounded_input(x) @ values.t(), rtol=1e-4, atol=1e-3)


def test_ranks_that_divide_a_block_are_refused():
    with pytest.raises(ModelError, match=r"down_proj: the inputs 0 to 100 of a rank .* block of 128"):
        made(BLOCKS, LinearShape(200, {"": 40}, shard="row"), Shard(0, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\] is not supported"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; 'e4m3' is"),
        ({"activation_scheme": "static"}, "activation_scheme 'static' is not supported; 'dynamic' is"),
        ({"activation_scheme": "other", "weight_block_size": None}, "'other' .*; 'dynamic' and 'static' are"),
        ({"scale_fmt": "e5m3"}, "scale_fmt 'e5m3' is not supported"),
        ({"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported; 'fp8' is"),
    ],
    ids=str,
)
def test_options_that_are_not_supported(changes, message):
    with pytest.raises(ModelError, match=message):
        made(BLOCKS | changes, LinearShape(192, {"": 40}))


def change(kind: str, to: Callable[[Tensor], Tensor] | None) -> Callable[[dict[str, Tensor]], None]:
    name = f"{MODULES[0]}.{kind}"

    def change(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if to is not None:
            tensors[name] = to(tensor)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change("weight_scale_inv", lambda s: s.fill_diagonal_(0)), "down_proj.weight_scale_inv has 0.0"),
        (change("weight_scale_inv", lambda s: s.fill_diagonal_(torch.nan)), "weight_scale_inv has nan"),
        (change("weight_scale_inv", lambda s: -s), "weight_scale_inv has -"),
        (change("weight_scale_inv", lambda s: s.int()), "weight_scale_inv holds int32"),
        (change("weight_scale_inv", None), "lacks .*down_proj.weight_scale_inv"),
        (change("weight_scale_inv", lambda s: s[:1].clone()), r"has the shape \[1, 3\]; .* says \[2, 3\]"),
        (change("weight", lambda w: w.float()), "down_proj.weight holds float32, not float8_e4m3fn"),
        (change("weight", lambda w: w.to(torch.float8_e5m2)), "weight holds float8_e5m2, not float8_e4m3fn"),
    ],
)
def test_tensors_that_make_no_sense(change, message, tmp_path):
    write(made_model(LlamaForCausalLM, LlamaConfig), tmp_path, Blocks())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(files_of(tmp_path), torch.float32, CPU)


def test_weights_without_scales_are_no_fp8(tmp_path):
    """A checkpoint whose configuration claims fp8 and whose weights are not."""
    model = made_model(LlamaForCausalLM, LlamaConfig)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": BLOCKS}))
    with pytest.raises(ModelError, match=r"lacks .*weight_scale_inv"):
        load(files_of(tmp_path), torch.float32, CPU)


def test_random_weights_keep_the_variance_of_their_input():
    weights = made(BLOCKS, LinearShape(256, {"": 400}))
    for seed, name in enumerate(weights.parameters()):
        weights.fill(name, weights.random(name, torch.Generator().manual_seed(7 + seed)))
    assert 0.8 < weights.matmul(torch.randn(50, 256)).std() < 1.2
