"""Experts as a part of a decoder: their parameters, formats, ranks, stacks and router.

Covers models/moe.py and models/families/moe_like.py.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.expert_routing import RouterOptions
from kernels.grouped_linear import GatedActivation
from models.errors import ModelError
from models.families import gpt_oss
from models.formats import CONVERSIONS, conversion_to
from models.formats.base import WHOLE, Shard
from models.forward_batch import ForwardBatch
from models.layers import LinearLeaf
from models.loader import load
from models.moe import Moe
from models.spec import MlpSpec, MoeSpec
from tests.models.families import make, prompt
from tests.models.harness import CPU, files_of, forward_logits
from tests.models.test_formats import ERROR_OF_PARTS

SILU = GatedActivation("silu")
BATCH = ForwardBatch(torch.zeros(0), torch.zeros(0), ())
SPEC = MoeSpec(
    5,
    12,
    RouterOptions(2, normalize=True),
    SILU,
    bias=True,
    router_bias=True,
    shared=MlpSpec(9),
    shared_gate=True,
)


def made(spec, name="dense", shard=WHOLE, seed=0):
    """A block of hidden size 16, filled with random tensors; and the tensors by address."""
    torch.manual_seed(seed)
    moe = Moe(spec, 16, torch.float32, CPU)
    make_linear = conversion_to(name)(torch.float32, CPU, shard)
    tensors = {}
    for address, leaf in moe.leaves():
        if isinstance(leaf, LinearLeaf):
            leaf.weights = make_linear(address, leaf.shape)
        for parameter, shape in leaf.parameters().items():
            tensors[f"{address}.{parameter}"] = torch.randn(shape) * 0.3
            leaf.fill(parameter, tensors[f"{address}.{parameter}"])
    return moe, tensors


def expected(x, tensors, top_k):
    """Compute tokens one by one with float64."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    rows = []
    for token in x.double():
        logits = t["router.weight"] @ token + t["router.bias"]
        weights, chosen = logits.softmax(0).topk(top_k)
        total = torch.zeros(16, dtype=torch.float64)
        for weight, expert in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            gate, up = (
                t[f"gate_up.{expert}.{half}.weight"] @ token + t[f"gate_up.{expert}.{half}.bias"]
                for half in ("gate", "up")
            )
            y = torch.nn.functional.silu(gate) * up
            total += weight * (t[f"down.{expert}.weight"] @ y + t[f"down.{expert}.bias"])
        y = torch.nn.functional.silu(t["shared.gate_up.gate.weight"] @ token)
        y = t["shared.down.weight"] @ (y * (t["shared.gate_up.up.weight"] @ token))
        rows.append(total + y * torch.sigmoid(t["router.shared_gate"] @ token))
    return torch.stack(rows)


@pytest.mark.parametrize(("name", "tolerance"), [("dense", 1e-5), ("int8", 2e-2), ("fp8", 0.1)])
def test_a_block_computes_the_experts_of_each_token(name, tolerance):
    # int4 leaves inputs of 16 dense; tests/models/test_int4.py has experts that it converts.
    # fp16 leaves experts dense.
    assert {"dense", "fp16", "fp8", "int4", "int8"} == set(CONVERSIONS), "add new conversions here"
    moe, tensors = made(SPEC, name)
    x = torch.randn(9, 16)
    exact = expected(x, tensors, 2)
    worst = (moe(x, BATCH) - exact).abs().max() / exact.abs().max()
    assert worst < tolerance


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_parts_of_ranks_sum_to_the_whole(name):
    x = torch.randn(7, 16)
    whole, _ = made(SPEC, name)
    parts = [made(SPEC, name, Shard(rank, 3))[0](x, BATCH) for rank in range(3)]
    bound = 1e-4 + ERROR_OF_PARTS.get(name, 0)
    torch.testing.assert_close(sum(parts), whole(x, BATCH), rtol=bound, atol=bound)


def test_a_token_has_one_result_alone_and_in_a_batch():
    moe, _ = made(SPEC)
    x = torch.randn(30, 16)
    torch.testing.assert_close(moe(x[11:12], BATCH), moe(x, BATCH)[11:12], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterOptions(6), "cannot have 6 of 5"),
        (RouterOptions(2, num_groups=2, top_groups=1), "cannot make 2 groups"),
        (RouterOptions(2, top_groups=2), "in 2 of 1 groups"),
    ],
)
def test_impossible_routing_is_refused(router, message):
    with pytest.raises(ValueError, match=message):
        MoeSpec(5, 8, router, SILU)


def test_experts_stored_one_by_one_and_stacked_are_equal(tmp_path):
    model = make("mixtral")
    for folder in ("single", "stacked"):
        model.save_pretrained(tmp_path / folder)
    file = tmp_path / "stacked" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            tensors[name] = tensor.contiguous()
    assert any(name.endswith(".experts.gate_up_proj") for name in tensors)
    save_file(tensors, file, {"format": "pt"})
    ids = prompt(20)
    single, stacked = (
        forward_logits(load(files_of(tmp_path / folder), torch.float32, CPU), ids)
        for folder in ("single", "stacked")
    )
    assert torch.equal(single, stacked)


def test_an_expert_that_is_missing_is_named(tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight"):
        load(files_of(tmp_path), torch.float32, CPU)


def test_the_bound_of_gpt_oss_is_read():
    """Older versions of transformers have a fixed one."""
    config = make("gpt_oss").config.to_dict() | {"swiglu_alpha": 1.5, "swiglu_limit": 3.0}
    mlp = gpt_oss.spec(config).layers[0].mlp
    assert mlp.activation == GatedActivation("swiglu_clamped", alpha=1.5, limit=3.0)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    make("glm4_moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ids = prompt(20)
    expected_logits = forward_logits(load(files_of(tmp_path), torch.float32, CPU), ids)
    for name in ("eh_proj", "mlp.experts.3.up_proj", "shared_head.norm"):
        tensors[f"model.layers.3.{name}.weight"] = torch.randn(2, 2)
    save_file(tensors, file, {"format": "pt"})
    assert torch.equal(forward_logits(load(files_of(tmp_path), torch.float32, CPU), ids), expected_logits)
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.randn(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"no place for model\.layers\.4\.eh_proj"):
        load(files_of(tmp_path), torch.float32, CPU)
