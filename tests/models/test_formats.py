"""Weight formats: their registry, exclusions, and the parts that several ranks compute.

Covers models/formats/scaled_rows.py, models/formats/int8.py and models/formats/fp8.py.
"""

import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.quantization_config import QuantizationMethod

from kernels.dispatch import forced
from kernels.quantize_rows import quantize_rows
from models.errors import ModelError
from models.families import phi3, qwen3_moe
from models.families.llama import WEIGHT_MAP
from models.formats import CONVERSIONS, REFUSED, STORED, conversion_to, dense, stored_format
from models.formats.base import LinearShape, Shard
from models.layers import Linear
from models.loader import load, outline
from models.weight_names import is_excluded, modules_of, names_of
from tests.models.families import prompt, randomised
from tests.models.harness import CPU, files_of, forward_logits
from tests.models.test_parity import BASE, TOLERANCE

ODD = {
    **BASE,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 81,
    "attention_bias": True,
    "mlp_bias": True,
}


# Largest difference of what ranks that divide the inputs compute, relative to the largest result, in formats
# where each rank quantizes its part of the activations.
ERROR_OF_PARTS = {"fp8": 0.05, "int8": 1e-3}


def made(name, shape, shard, tensors):
    """The weights of one linear in a format, filled."""
    weights = conversion_to(name)(torch.float32, CPU, shard)("layers.0.mlp.down", shape)
    assert weights.parameters() == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        weights.fill(key, tensor)
    return weights


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_one_linear_make_the_whole(name, world):
    torch.manual_seed(0)
    x = torch.randn(4, 7)
    outputs = {"a": 5, "b": 3}
    tensors = {f"{key}.weight": torch.randn(n, 7) for key, n in outputs.items()}
    tensors |= {f"{key}.bias": torch.randn(n) for key, n in outputs.items()}
    whole = made(name, LinearShape(7, outputs, bias=True), Shard(), tensors).matmul(x).split([5, 3], 1)
    shards = [Shard(rank, world) for rank in range(world)]

    shape = LinearShape(7, outputs, bias=True, shard="column")
    columns = [
        made(name, shape, shard, tensors)
        .matmul(x)
        .split([len(range(n)[shard.slice(n)]) for n in outputs.values()], 1)
        for shard in shards
    ]
    for index, expected in enumerate(whole):
        together = torch.cat([part[index] for part in columns], 1)
        torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-5)

    shape = LinearShape(7, outputs, bias=True, shard="row")
    rows = [made(name, shape, shard, tensors).matmul(x[:, shard.slice(7)]) for shard in shards]
    expected = torch.cat(whole, 1)
    error = 0 if world == 1 else ERROR_OF_PARTS.get(name, 0)
    torch.testing.assert_close(
        sum(rows), expected, rtol=1e-5, atol=1e-5 + error * expected.abs().max().item()
    )


class Together:
    """Weights of one rank whose product waits for those of the others and is combined with them."""

    def __init__(self, weights, rank, results, barrier, combine):
        self._weights, self._rank, self._results = weights, rank, results
        self._barrier, self._combine = barrier, combine

    def matmul(self, x):
        self._results[self._rank] = self._weights.matmul(x)
        self._barrier.wait(10)
        whole = self._combine(self._results)
        self._barrier.wait(10)
        return whole


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_two_ranks_compute_what_one_computes(name, tied, tmp_path):
    """A whole model: rank by rank on two threads, row shards summed, logits concatenated."""
    model = randomised(LlamaForCausalLM(LlamaConfig(**{**ODD, "tie_word_embeddings": tied})))
    model.save_pretrained(tmp_path)
    world = 2
    whole, *ranks = (
        load(files_of(tmp_path), torch.float32, CPU, quantization=name, shard=shard)
        for shard in (Shard(), *(Shard(rank, world) for rank in range(world)))
    )
    barrier = threading.Barrier(world)
    for address, linear in whole.leaves():
        if not isinstance(linear, Linear) or address.endswith(("qkv", "gate_up")):
            continue  # a rank uses its part of these itself
        combine = sum if linear.shape.shard == "row" else partial(torch.cat, dim=1)
        results = [None] * world
        for rank, decoder in enumerate(ranks):
            linear = dict(decoder.leaves())[address]
            linear.weights = Together(linear.weights, rank, results, barrier, combine)
    ids, chunks = prompt(40), [17, 1, 22]
    expected = forward_logits(whole, ids, chunks)
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(lambda decoder: forward_logits(decoder, ids, chunks), ranks))
    for logits in found:
        worst = (logits - expected).abs().max().item() / expected.abs().max().item()
        assert worst < TOLERANCE + 4 * ERROR_OF_PARTS.get(name, 0), (
            f"logits differ by {worst:.1e} of the largest"
        )


def test_ranks_that_heads_cannot_be_divided_among(tmp_path):
    LlamaForCausalLM(LlamaConfig(**ODD)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="2 key/value heads cannot be divided among 3 ranks"):
        load(files_of(tmp_path), torch.float32, CPU, shard=Shard(0, 3))


def test_every_format_is_one_module_of_its_name():
    for name, path in CONVERSIONS.items():
        assert path.startswith(f"models.formats.{name}:")
        assert conversion_to(name) is resolve_name(path)
    for name, path in STORED.items():
        assert path.startswith(f"models.formats.{name.replace('-', '_')}:")
        assert stored_format({"quant_method": name}) is resolve_name(path)


def test_an_unknown_conversion_is_named_with_the_known_ones(halved):
    for name in ("int3", "halved"):
        known = re.escape(f"quantization '{name}' is not known; known: auto, {', '.join(CONVERSIONS)}")
        with pytest.raises(ModelError, match=f"^{known}$"):
            conversion_to(name)


def test_an_unknown_stored_format_is_named_with_those_that_can_be_read(monkeypatch):
    monkeypatch.setattr("models.formats.STORED", {})
    with pytest.raises(ModelError, match=r"'gptq' is not supported .*checkpoints: none.*use an unquantized"):
        stored_format({"quant_method": "gptq"})
    monkeypatch.setattr("models.formats.STORED", {"halved": HALVED, "int8": HALVED})
    for name in ("gptq", "dense", ["gptq"]):
        with pytest.raises(ModelError, match=r"is not supported \(supported in checkpoints: halved, int8\)"):
            stored_format({"quant_method": name})


@pytest.mark.parametrize("method", REFUSED)
def test_a_refusal_is_one_line_with_what_to_use_in_its_place(method, tmp_path):
    """Before the files of weights are looked for: the folder has none."""
    assert method not in STORED, "the format is read"
    config = LlamaConfig(**BASE, architectures=["LlamaForCausalLM"]).to_dict()
    config["quantization_config"] = {"quant_method": method.upper()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"quantization '{method}' \(.+\) is not supported; use ") as caught:
        load(files_of(tmp_path), torch.float32, CPU)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 250 + len(str(tmp_path))
    for name in re.findall(r"--quantization (\w+)(?: or (\w+))?", message):
        assert {*filter(None, name)} <= CONVERSIONS.keys(), (
            f"{message} names a conversion that does not exist"
        )


def test_every_method_of_transformers_is_read_or_refused():
    methods = {method.value for method in QuantizationMethod}
    assert methods <= STORED.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
        ({"load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes"),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "mlx"),
        ({"bits": 4}, "of unknown kind"),
    ],
)
def test_configurations_without_a_method(config, method):
    with pytest.raises(ModelError, match=rf"quantization '{method}' "):
        stored_format(config)


def test_one_name_may_be_a_stored_format_and_a_conversion(monkeypatch):
    monkeypatch.setitem(STORED, "int8", HALVED)
    assert stored_format({"quant_method": "int8"}) is halved_linears
    assert conversion_to("int8") is resolve_name(CONVERSIONS["int8"])


class HalvedWeights(dense.DenseWeights):
    """A format whose checkpoints store half of each weight, as integers."""

    def fill(self, parameter, tensor):
        assert tensor.dtype == torch.int32
        super().fill(parameter, tensor.float() * 2)


def halved_linears(options, *where):
    return lambda address, shape: HalvedWeights(shape, *where)


HALVED = f"{__name__}:halved_linears"


@pytest.fixture
def halved(monkeypatch):
    """A format for checkpoints with `quant_method: halved`."""
    monkeypatch.setitem(STORED, "halved", HALVED)


def halve(folder, excluded):
    """Store the linears of a checkpoint in the format, but for the excluded ones."""
    model = LlamaForCausalLM(LlamaConfig(**BASE))
    for parameter in model.parameters():
        parameter.data = torch.randint(-3, 4, parameter.shape) * 2.0
    state, plain = {}, model.state_dict()
    for name, tensor in plain.items():
        is_dense = name.endswith(("norm.weight", "embed_tokens.weight")) or is_excluded_name(name, excluded)
        state[name] = tensor if is_dense else (tensor / 2).int()
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "halved", "modules_to_not_convert": excluded}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def is_excluded_name(name, excluded):
    return any(f".{part}." in f".{name}" for part in excluded)


def test_a_checkpoint_names_its_format_and_what_is_excluded_from_it(halved, tmp_path):
    plain = halve(tmp_path, ["lm_head", "model.layers.1.mlp"])
    decoder = load(files_of(tmp_path), torch.float32, CPU)
    formats_found = {type(linear.weights).__name__ for linear in (decoder.output, decoder.layers[1].mlp.down)}
    assert formats_found == {"DenseWeights"}
    assert isinstance(decoder.layers[0].mlp.down.weights, HalvedWeights)
    x = torch.randn(2, BASE["intermediate_size"])
    for index in (0, 1):
        found = decoder.layers[index].mlp.down(x, SimpleNamespace())
        expected = x @ plain[f"model.layers.{index}.mlp.down_proj.weight"].t()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name in ("int8", "halved"):
        with pytest.raises(ModelError, match=r"quantized already \(halved\), so leave it out"):
            load(files_of(tmp_path), torch.float32, CPU, quantization=name)


def test_half_of_a_fused_linear_cannot_be_excluded():
    assert names_of("layers.3.attention.qkv", WEIGHT_MAP) == [
        f"model.layers.3.self_attn.{name}_proj" for name in "qkv"
    ]
    modules = modules_of("layers.3.attention.qkv", WEIGHT_MAP, ())
    for name in ("self_attn", "model.layers.3.", "layers.3.self_attn.", ".self_attn"):
        assert is_excluded(modules, [name]), name
    assert not is_excluded(modules, ["model.layers.33", "proj", "mlp", ".", ""])
    with pytest.raises(ModelError, match=r"only some of model\.layers\.3\.self_attn\.q_proj"):
        is_excluded(modules, ["q_proj"])


def test_modules_of_a_linear_are_those_in_the_checkpoint():
    names = ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.q_proj")
    assert modules_of("layers.3.attention.qkv", phi3.WEIGHT_MAP, names[:1]) == [names[0]]
    assert names[1] in modules_of("layers.3.attention.qkv", phi3.WEIGHT_MAP, ())
    experts = [f"model.layers.0.mlp.experts.0.{name}_proj" for name in ("gate", "up")]
    assert modules_of("layers.0.mlp.gate_up", qwen3_moe.WEIGHT_MAP, experts) == experts


def num_bytes(decoder):
    """Bytes of everything the linears of the layers hold."""
    weights = [
        leaf.weights
        for address, leaf in decoder.leaves()
        if address.startswith("layers.") and isinstance(leaf, Linear)
    ]
    held = [value for one in weights for value in vars(one).values()]
    held = [getattr(value, "blocked", getattr(value, "weight", value)) for value in held]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_its_own_dequantized_weights(tied, tmp_path):
    """Compare a model in int8 with a dense one whose weights were rounded to int8 before."""
    config = LlamaConfig(**{**ODD, "tie_word_embeddings": tied})
    model = randomised(LlamaForCausalLM(config))
    model.model.layers[1].mlp.up_proj.weight.data[5] = 0  # a row without a scale
    model.save_pretrained(tmp_path / "plain")
    decoder = load(files_of(tmp_path / "plain"), torch.float32, CPU, quantization="int8")
    for _, parameter in model.named_parameters():
        if parameter.ndim == 2:
            values, scale = quantize_rows(parameter.data, torch.int8)
            assert values.abs().amax() <= 127
            error = (values * scale[:, None] - parameter.data).abs()
            assert (error <= scale[:, None] / 2 * 1.0001).all(), "each value is the nearest"
            parameter.data = values * scale[:, None]
    model.save_pretrained(tmp_path / "rounded")
    ids, chunks = prompt(70), [30, 1, 39]
    expected = forward_logits(load(files_of(tmp_path / "rounded"), torch.float32, CPU), ids, chunks)
    with forced("torch"):  # compiled products round activations to 14 bits
        found = forward_logits(decoder, ids, chunks)
    worst = (found - expected).abs().max().item() / expected.abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst:.1e} of the largest"
    assert tied == (decoder.embedding.weights is decoder.output.weights), "a tied table exists once"
    wide = load(files_of(tmp_path / "plain"), torch.bfloat16, CPU, quantization="int8")
    assert isinstance(wide.output.weights, dense.DenseWeights), "the head stays dense beside 16 bits"


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_bits_take_half_the_memory_of_16(name, tmp_path):
    config = LlamaConfig(**{**BASE, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 16})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    plain, quantized = (
        num_bytes(load(files_of(tmp_path), torch.bfloat16, CPU, quantization=chosen))
        for chosen in (None, name)
    )
    assert 0.5 < quantized / plain < 0.52


def fp8_linear(weight, bias):
    """Return the weights of a linear in fp8, and the weight that they are."""
    weights = conversion_to("fp8")(torch.float32, CPU, Shard())(
        "layers.0.mlp.down", LinearShape(weight.shape[1], {"": len(weight)}, bias=True)
    )
    weights.fill("weight", weight)
    weights.fill("bias", bias)
    values, scale = quantize_rows(weight, torch.float8_e4m3fn)
    return weights, values.float() * scale[:, None]


def test_fp8_is_its_own_dequantized_weights_and_activations():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(5, 64), torch.randn(5), torch.randn(3, 64)
    weight[2], x[1] = 0, 0
    weights, rounded = fp8_linear(weight, bias)
    # Three bits after the leading one: half of the last is a sixteenth; below 2**-6, multiples of 2**-9.
    bound = weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert ((rounded - weight).abs() <= bound * 1.0001).all()
    values, scale = quantize_rows(x, torch.float8_e4m3fn)
    expected = (values.float() * scale[:, None]) @ rounded.t() + bias
    torch.testing.assert_close(weights.matmul(x), expected)


def test_a_gpu_without_fp8_keeps_activations(monkeypatch):
    monkeypatch.setattr("models.formats.scaled_rows.has_fp8", lambda _device: False)
    weight, bias, x = torch.randn(5, 64), torch.randn(5), torch.randn(3, 64)
    weights, rounded = fp8_linear(weight, bias)
    torch.testing.assert_close(weights.matmul(x), x @ rounded.t() + bias)
    assert weights.fallback == "cpu has no products of fp8, so that only weights are fp8"


def test_the_format_of_the_docs_works_as_its_test_says(tmp_path, monkeypatch):
    """The two files of docs/add-a-format.md, as they are there."""
    page = (Path(__file__).parents[2] / "docs" / "add-a-format.md").read_text(encoding="utf-8")
    _, source, test = re.findall(r"```python\n(.*?)```", page.partition("## Step by step")[2], re.DOTALL)
    module = ModuleType("models.formats.rowpair")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, module.__dict__)
    monkeypatch.setitem(STORED, "rowpair", "models.formats.rowpair:stored")
    written: dict = {}
    exec(test, written)
    written["test_logits_are_those_of_the_dequantized_model"](tmp_path)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_conversion_can_be_outlined_without_values(name, tmp_path):
    LlamaForCausalLM(LlamaConfig(**BASE)).save_pretrained(tmp_path)
    found = outline(files_of(tmp_path), torch.float32, quantization=name)
    assert found.quantization == name
