"""Weights of four bits, converted from unquantized ones: errors, groups, ranks, and whole models.

Covers models/formats/int4.py.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from models.errors import ModelError
from models.formats import conversion_to
from models.formats.base import WHOLE, LinearShape, Shard
from models.formats.dense import DenseWeights
from models.formats.int4 import Int4Weights, quantize
from models.loader import load
from tests.models.families import BASE, MOE, prompt, randomised
from tests.models.harness import CPU, files_of, forward_logits
from tests.models.test_parity import TOLERANCE

WIDE = {**BASE, "hidden_size": 192, "intermediate_size": 256, "head_dim": 32}


def made(shape, shard=WHOLE):
    return conversion_to("int4")(torch.float32, CPU, shard)("layers.0.mlp.down", shape)


def dequantized(weight, group_size):
    codes, scales = quantize(weight, group_size, torch.float32)
    return ((codes.float() - 8).unflatten(1, (-1, group_size)) * scales[..., None]).flatten(1)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_conversion_has_a_small_error(group_size):
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    weight[3, :group_size] = 0
    error = (dequantized(weight, group_size) - weight).norm() / weight.norm()
    assert 0.07 < error < 0.1
    assert (dequantized(weight, group_size)[3, :group_size] == 0).all()
    codes, _ = quantize(weight, group_size, torch.bfloat16)
    assert codes.max() == 15 and codes.min() == 0


def test_the_largest_weights_are_kept_and_groups_that_are_not_finite_spoil_their_row_alone():
    torch.manual_seed(0)
    weight = torch.randn(5, 64)
    weight[0, :32] *= 1e30  # squares overflow
    weight[1, 5], weight[2, 40] = torch.nan, -torch.inf
    found = dequantized(weight, 32)
    error, first = ((rows[0].double().view(2, 32).norm(dim=1)) for rows in (found - weight, weight))
    assert (error < 0.12 * first).all(), error / first
    assert found.isnan().any(1).tolist() == [False, True, True, False, False]
    assert quantize(weight, 32, torch.float16)[1].isnan().any(1).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(("in_features", "group_size"), [(256, 128), (192, 64), (160, 32)])
def test_groups_are_the_largest_that_divide_the_inputs(in_features, group_size):
    torch.manual_seed(0)
    weights = made(LinearShape(in_features, {"a": 5, "b": 30}, bias=True))
    tensors = {f"{name}.weight": torch.randn(n, in_features) for name, n in (("a", 5), ("b", 30))}
    tensors |= {f"{name}.bias": torch.randn(n) for name, n in (("a", 5), ("b", 30))}
    for name, tensor in tensors.items():
        weights.fill(name, tensor)
    x = torch.randn(3, in_features)
    expected = torch.cat(
        [x @ dequantized(tensors[f"{n}.weight"], group_size).t() + tensors[f"{n}.bias"] for n in "ab"], 1
    )
    torch.testing.assert_close(weights.matmul(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_features", [7, 48, 200])
def test_inputs_that_32_does_not_divide_stay_dense(in_features):
    assert isinstance(made(LinearShape(in_features, {"": 4})), DenseWeights)
    assert isinstance(made(LinearShape(96, {"": 4}, shard="row"), Shard(0, 2)), DenseWeights)
    assert isinstance(made(LinearShape(96, {"": 4}, shard="row"), Shard(0, 3)), Int4Weights)


@pytest.mark.parametrize("tied", [False, True])
def test_the_log_says_which_linears_stay_dense(tied, tmp_path, caplog):
    sizes = {"moe_intermediate_size": 40, "hidden_size": 64, "head_dim": 16, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(**{**MOE, **sizes, "tie_word_embeddings": tied})
    compare(randomised(Qwen3MoeForCausalLM(config)), tmp_path, {64: 64, 96: 32})
    lines = [record.message for record in caplog.records if "int4" in record.message]
    assert len(lines) == 1, lines
    assert lines[0].endswith(
        f"{config.num_hidden_layers} linears: int4 takes a multiple of 32 inputs on each rank: they are kept "
        "in float32"
    )


@pytest.mark.parametrize(("shard", "world"), [("column", 3), ("row", 2), ("row", 3)])
def test_ranks_make_the_whole(shard, world):
    torch.manual_seed(0)
    size = 384
    outputs = {"a": 50, "b": 31}
    tensors = {f"{name}.weight": torch.randn(n, size) for name, n in outputs.items()}
    tensors |= {f"{name}.bias": torch.randn(n) for name, n in outputs.items()}
    x = torch.randn(4, size)

    def product(shape, shard, part):
        weights = made(shape, shard)
        assert isinstance(weights, Int4Weights)
        for name, tensor in tensors.items():
            weights.fill(name, tensor)
        return weights.matmul(part)

    whole = product(LinearShape(size, outputs, bias=True), Shard(), x)
    shape = LinearShape(size, outputs, bias=True, shard=shard)
    ranks = [Shard(rank, world) for rank in range(world)]
    if shard == "row":  # parts of 192 inputs divide the second of three groups
        found = sum(product(shape, rank, x[:, rank.slice(size)]) for rank in ranks)
    else:
        halves = [
            product(shape, rank, x).split([len(range(n)[rank.slice(n)]) for n in outputs.values()], 1)
            for rank in ranks
        ]
        found = torch.cat([half[0] for half in halves] + [half[1] for half in halves], 1)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_a_group_that_ranks_cannot_divide_is_refused():
    with pytest.raises(ModelError, match="groups of 128 with inputs 0 to 200 of 400 cannot be divided"):
        Int4Weights(LinearShape(400, {"": 4}, shard="row"), torch.float32, CPU, Shard(0, 2), 128)
    with pytest.raises(ModelError, match="groups of 16 "):
        Int4Weights(LinearShape(256, {"": 4}), torch.float32, CPU, Shard(), 16)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_its_own_dequantized_weights(tied, tmp_path):
    model = randomised(LlamaForCausalLM(LlamaConfig(**{**WIDE, "tie_word_embeddings": tied})))
    compare(model, tmp_path, {192: 64, 256: 128})


def test_experts(tmp_path):
    config = Qwen3MoeConfig(
        **{**MOE, "hidden_size": 64, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
    )
    compare(randomised(Qwen3MoeForCausalLM(config)), tmp_path, {64: 64, 96: 32})


def compare(model, folder, group_sizes):
    """Compare a model in int4 with a dense one whose weights were rounded to int4 before."""
    model.save_pretrained(folder / "plain")
    decoder = load(files_of(folder / "plain"), torch.float32, CPU, quantization="int4")
    assert isinstance(decoder.output.weights, DenseWeights), "the head stays dense"
    for name, parameter in model.named_parameters():
        group_size = group_sizes.get(parameter.shape[-1])
        if name.endswith(("proj.weight", "proj")) and group_size:
            rows = parameter.data.flatten(0, -2)
            parameter.data = dequantized(rows, group_size).view(parameter.shape)
    model.save_pretrained(folder / "rounded")
    ids, chunks = prompt(70), [30, 1, 39]
    expected = forward_logits(load(files_of(folder / "rounded"), torch.float32, CPU), ids, chunks)
    found = forward_logits(decoder, ids, chunks)
    worst = (found - expected).abs().max().item() / expected.abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst:.1e} of the largest"
