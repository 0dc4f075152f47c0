"""What the loader refuses, by name; and models with random weights.

Covers models/checkpoint.py and models/placement.py.
"""

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kernels.linear import computes_bfloat16
from models.errors import ModelError
from models.loader import default_dtype, empty_decoder, load, random_decoder, read_spec
from models.shapes import SHAPES
from tests.models.harness import CPU, files_of, forward_logits

SHARDED = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_json(path, **changes):
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))


def load_folder(folder):
    return load(files_of(folder), torch.float32, CPU)


def test_missing_tensor(checkpoint):
    change_weights(checkpoint, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight$"):
        load_folder(checkpoint)


def test_many_missing_tensors_are_counted(checkpoint):
    def keep_the_norm(weights):
        for name in [name for name in weights if name != "model.norm.weight"]:
            del weights[name]

    change_weights(checkpoint, keep_the_norm)
    with pytest.raises(ModelError, match=r"and 15 more tensors$"):
        load_folder(checkpoint)


def test_unknown_tensor(checkpoint):
    change_weights(checkpoint, lambda weights: weights.update({"model.layers.0.extra.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"no place for model\.layers\.0\.extra\.weight$"):
        load_folder(checkpoint)


def test_tensor_of_an_unknown_layer(checkpoint):
    change_json(checkpoint / "config.json", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"no place for model\.layers\.1\..* and 4 more tensors$"):
        load_folder(checkpoint)


def test_bias_the_configuration_does_not_announce(checkpoint):
    name = "model.layers.0.self_attn.q_proj.bias"
    change_weights(checkpoint, lambda weights: weights.update({name: torch.ones(32)}))
    with pytest.raises(ModelError, match=r"no place for model\.layers\.0\.self_attn\.q_proj\.bias$"):
        load_folder(checkpoint)


def test_wrong_shape(checkpoint):
    change_json(checkpoint / "config.json", vocab_size=65)
    message = r"lm_head\.weight has the shape \[64, 32\]; the configuration says \[65, 32\] \(1 more differ"
    with pytest.raises(ModelError, match=message):
        load_folder(checkpoint)


def test_tensor_in_two_shards(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    save_file({"model.norm.weight": weights["model.norm.weight"]}, checkpoint / "more.safetensors")
    index = dict.fromkeys(weights, "model.safetensors") | {"model.norm.weight": "more.safetensors"}
    (checkpoint / SHARDED).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in two files"):
        load_folder(checkpoint)


def warnings_in(caplog):
    """Other tests may have set the level of the log to INFO."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_stored_copy_of_a_tied_output_is_ignored(checkpoint, caplog):
    change_json(checkpoint / "config.json", tie_word_embeddings=True)
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(checkpoint, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    decoder = load_folder(checkpoint)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ embedding.t(), rtol=1e-4, atol=1e-5)
    assert not warnings_in(caplog)


def test_an_output_of_its_own_is_used_although_the_flag_says_tied(checkpoint, caplog):
    """As transformers does, with a warning."""
    change_json(checkpoint / "config.json", tie_word_embeddings=True)
    output = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    decoder = load_folder(checkpoint)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(decoder.logits(hidden), hidden @ output.t(), rtol=1e-4, atol=1e-5)
    assert "different weights for both" in caplog.text


BUFFERS = (
    "model.rotary_emb.inv_freq",
    "model.layers.1.self_attn.rotary_emb.inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.layers.0.attn.bias",
    "model.layers.0.self_attn.masked_bias",
    "model.embeddings.position_ids",
    "position_ids",
)


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_buffers_of_older_checkpoints_are_skipped(checkpoint, name, dtype):
    change_weights(checkpoint, lambda weights: weights.update({name: torch.ones(4, dtype=dtype)}))
    load_folder(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_without_a_configuration_are_refused(checkpoint, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(checkpoint, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(
        ModelError, match=rf"{name} is quantized \({str(dtype)[6:]}\), .* no quantization_config"
    ):
        load_folder(checkpoint)


def test_a_head_of_the_other_kind(checkpoint):
    score = torch.ones(1, 32)
    change_weights(checkpoint, lambda weights: weights.update({"score.weight": score}))
    with pytest.raises(ModelError, match=r"no place for score\.weight$"):
        load_folder(checkpoint)
    classifier = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    change_json(checkpoint / "config.json", **classifier)
    with pytest.raises(ModelError, match=r"no place for lm_head\.weight$"):
        load_folder(checkpoint)
    change_weights(checkpoint, lambda weights: weights.pop("lm_head.weight"))
    assert load_folder(checkpoint).score(torch.ones(2, 32)).tolist() == [[32.0], [32.0]]
    change_weights(checkpoint, lambda weights: weights.pop("score.weight"))
    with pytest.raises(ModelError, match=r"lacks score\.weight"):
        load_folder(checkpoint)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "", 7]
)
def test_index_that_points_outside(checkpoint, name):
    (checkpoint / SHARDED).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelError, match="points outside its folder"):
        load_folder(checkpoint)


def test_index_that_names_a_missing_file(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "part.safetensors")
    (checkpoint / SHARDED).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks gone\.safetensors"):
        load_folder(checkpoint)


def test_index_that_is_left_beside_the_whole_file(checkpoint):
    (checkpoint / SHARDED).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    load_folder(checkpoint)


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["a"]}])
def test_index_without_a_map(checkpoint, index):
    (checkpoint / SHARDED).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="has no weight_map"):
        load_folder(checkpoint)


def test_pickles_are_refused_with_the_reason(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match="reading a pickle runs whatever code is in it"):
        load_folder(checkpoint)


def test_no_weights_at_all(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_folder(checkpoint)


def test_broken_safetensors(checkpoint):
    whole = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_folder(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel is not supported; .*`monoloop models` lists the \d+ that are",
        ),
        ({"quantization_config": {"quant_method": "eetq"}}, r"'eetq' \(EETQ, .* use the unquantized"),
        ({"hidden_act": "mish"}, "'mish' is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"vocab_size": "many"}, "vocab_size is 'many', which is not a whole number"),
        ({"num_labels": "many", "architectures": ["LlamaForSequenceClassification"]}, "num_labels is 'many'"),
    ],
)
def test_configuration_that_cannot_be_served(checkpoint, changes, message):
    change_json(checkpoint / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        read_spec(files_of(checkpoint))


def test_configuration_that_lacks_a_value(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    del config["hidden_size"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 'hidden_size'"):
        read_spec(files_of(checkpoint))


def test_configuration_that_is_no_json(checkpoint):
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_spec(files_of(checkpoint))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_values_that_float16_cannot_hold_are_named(checkpoint, stored, caplog):
    def change(weights):
        for name, tensor in weights.items():
            weights[name] = tensor.to(stored)
        weights["model.layers.0.mlp.up_proj.weight"][3, 5] = -70_000
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan

    change_weights(checkpoint, change)
    load_folder(checkpoint)
    load(files_of(checkpoint), torch.bfloat16, CPU)
    assert not warnings_in(caplog)
    load(files_of(checkpoint), torch.float16, CPU)
    (line,) = warnings_in(caplog)
    assert "values of model.layers.0.mlp.up_proj.weight are infinite in float16" in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_on_a_terminal_and_a_line_in_the_log(checkpoint, is_terminal, monkeypatch, capfd, caplog):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    caplog.set_level(logging.INFO, "monoloop.models")
    load(files_of(checkpoint), torch.float32, CPU, progress=True)
    assert ("loading test" in capfd.readouterr().err) == is_terminal
    (line,) = caplog.messages
    assert re.fullmatch(r"loaded 0\.00 GB of weights in .* GB/s\); peak host memory \d+\.\d+ GB", line)


def test_random_decoder_depends_on_its_seed():
    ids = list(range(40))
    first, again, other = (
        forward_logits(random_decoder(SHAPES["tiny"], torch.float32, CPU, seed), ids) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all()
    assert 0.1 < first.std() < 10, "logits of random weights are far from any real model's"


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [("smollm2-135m", 134_515_008), ("llama-1b", 1_235_814_400), ("llama-8b", 8_030_261_248)],
)
def test_named_shapes_have_the_published_size(shape, parameters):
    decoder = empty_decoder(SHAPES[shape], torch.bfloat16, torch.device("meta"))
    assert sum(torch.Size(size).numel() for _, _, size in decoder.parameters().values()) == parameters


def test_kv_groups():
    spec = SHAPES["tiny"]
    (group,) = spec.kv_groups
    assert group.layers == (0, 1)
    assert (group.num_kv_heads, group.head_dim, group.window) == (spec.num_kv_heads, spec.head_dim, 0)


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([8] * 3, [(0, 1, 2)]),
        ([8, 0] * 3, [(0, 2, 4), (1, 3, 5)]),
        ([8, 8, 0] * 2, [(0, 3), (1, 4), (2, 5)]),
        ([8, 8, 8, 8, 0, 8, 8], [(0,), (1,), (2,), (3,), (5,), (6,), (4,)]),
        ([8] * 6 + [0] * 5, [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]),
        ([8] * 5 + [0] * 2, [(0, 3), (1, 4), (2,), (5, 6)]),
    ],
)
def test_kinds_of_layers_are_divided_into_groups_of_equal_size(windows, groups):
    spec = SHAPES["tiny"]
    attention = spec.layers[0].attention
    layers = [replace(spec.layers[0], attention=replace(attention, window=window)) for window in windows]
    found = replace(spec, layers=tuple(layers)).kv_groups
    assert [group.layers for group in found] == groups
    assert all({windows[layer] for layer in group.layers} == {group.window} for group in found)


def test_default_dtype():
    assert default_dtype(torch.device("cuda")) == torch.bfloat16
    expected = torch.bfloat16 if computes_bfloat16() else torch.float32
    assert default_dtype(CPU) == expected
