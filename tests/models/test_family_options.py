"""Options and older spellings of configurations, family by family: computed like transformers, or refused.

Covers models/families/llama_like.py.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers

from models.checkpoint import read_family_spec
from models.errors import ModelError
from models.families import architectures_of, family_of
from models.loader import load, read_spec
from models.spec import MlpSpec
from tests.models.families import FAMILIES, make, prompt
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
OPTIONS = [
    ("cohere", UNTIED),
    ("cohere", {"attention_bias": False, "num_key_value_heads": 6}),
    ("cohere2", {"attention_bias": True}),
    ("exaone4", TIED),
    ("gemma", {"attention_bias": True, **UNTIED}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma3", {"final_logit_softcapping": 7.0, "attention_bias": True}),
    ("glm4", {"attention_bias": False, **TIED}),
    ("granite", {"attention_bias": True, **TIED}),
    ("internlm2", {"hidden_act": "gelu"}),
    ("minicpm", {"attention_bias": True}),
    ("olmo2", {"attention_bias": False, "num_key_value_heads": 6, **TIED}),
    ("olmo3", {"rope_scaling": None}),
    ("phi", {"hidden_act": "gelu", "partial_rotary_factor": 0.34}),
    ("stablelm", {"hidden_act": "gelu", **TIED}),
    ("starcoder2", {"hidden_act": "relu", "sliding_window": None}),
    ("starcoder2", {"hidden_act": "relu2"}),
    ("starcoder2", {"hidden_act": "silu"}),
]
# How older versions of transformers wrote config.json: changes, and keys that were not there.
NO_TYPES, NO_ROPE = ["layer_types"], ["rope_parameters"]
OLDER = [
    ("cohere", {"rope_theta": 5e5}, NO_ROPE),
    ("cohere2", {"sliding_window_pattern": 4, "rope_theta": 1e4}, NO_TYPES + NO_ROPE),
    ("cohere2", {}, NO_TYPES),
    ("exaone4", {"sliding_window_pattern": 4}, NO_TYPES),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, []),
    ("gemma", {"hidden_activation": None, "rope_theta": 1e4}, NO_ROPE),
    ("gemma", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu"}, []),
    ("gemma2", {"hidden_act": "gelu", "rope_theta": 1e4}, NO_TYPES + NO_ROPE),
    (
        "gemma3",
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        },
        NO_TYPES + NO_ROPE,
    ),
    ("glm4", {"partial_rotary_factor": 0.5, "rope_theta": 1e4}, NO_ROPE),
    (
        "olmo3",
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
        NO_TYPES + NO_ROPE,
    ),
    ("phi", {"rope_theta": 1e4, "rope_scaling": None}, NO_ROPE),
    ("stablelm", {"rope_theta": 1e4, "partial_rotary_factor": 0.4}, NO_ROPE),
    ("starcoder2", {"rope_theta": 1e4}, NO_ROPE),
]
REFUSED = [
    ("cohere2", {"use_qk_norm": True}),
    ("dots1", {"scoring_func": "softmax"}),
    ("gemma", {"use_bidirectional_attention": True}),
    ("gemma3", {"attn_logit_softcapping": 50.0}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("glm4_moe", {"topk_method": "greedy"}),
    ("minicpm", {"num_experts": 8}),
    ("minicpm", {"sparse_config": {"kernel_size": 32}}),
    ("phi", {"qk_layernorm": True}),
]


def check(model, folder):
    ids = prompt(50)
    expected = transformers_logits(model, ids)
    found = forward_logits(load(files_of(folder), torch.float32, CPU), ids, [20, 1, 29])
    worst = ((found - expected).abs().max() / expected.abs().max()).item()
    assert worst < 2e-5, f"logits differ by {worst:.1e} of the largest"


def change_config(folder, changes, removed=()):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in removed:
        config.pop(key, None)
    path.write_text(json.dumps(config | changes))


@pytest.mark.parametrize(("family", "changes"), OPTIONS, ids=str)
def test_options(family, changes, tmp_path):
    model = make(family, **changes)
    model.save_pretrained(tmp_path)
    check(model, tmp_path)


@pytest.mark.parametrize(("family", "changes", "removed"), OLDER, ids=str)
def test_older_spellings(family, changes, removed, tmp_path):
    model = make(family)
    model.save_pretrained(tmp_path)
    change_config(tmp_path, changes, removed)
    check(model, tmp_path)


@pytest.mark.parametrize(("family", "changes"), REFUSED, ids=str)
def test_what_is_not_computed_is_refused_by_name(family, changes, tmp_path):
    make(family).save_pretrained(tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(ModelError, match=f"{next(iter(changes))} = .* is not supported"):
        read_spec(files_of(tmp_path))


@pytest.mark.parametrize(
    ("family", "key", "value", "kind"),
    [
        ("glm4_moe", "n_group", [3], "a whole number"),
        ("glm4_moe", "n_group", 0, "between 1 and 65536"),
        ("glm4_moe", "norm_topk_prob", "maybe", "neither true nor false"),
        ("glm4_moe", "num_nextn_predict_layers", -2, "between 0 and 1024"),
        ("glm4_moe", "routed_scaling_factor", "x", "a number of at least 0"),
        ("glm4_moe", "routed_scaling_factor", float("nan"), "a number of at least 0"),
        ("granite", "logits_scaling", 0, "a number above 0"),
        ("gemma2", "query_pre_attn_scalar", 0, "a number above 0"),
        ("phi", "partial_rotary_factor", "half", "a number of at least 0"),
        ("smollm3", "no_rope_layers", 1, "a list of"),
        ("gemma3 with images", "text_config", 3, "a JSON object"),
        ("phi3", "rope_parameters", 3, "a JSON object"),
        ("gemma3", "rope_parameters", 3, "a JSON object"),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_its_key(family, key, value, kind, tmp_path):
    make(family).save_pretrained(tmp_path)
    change_config(tmp_path, {key: value, **({"rope_parameters": {}} if family == "phi" else {})})
    with pytest.raises(ModelError, match=f"{key} is .*, which is (not )?{kind}"):
        read_spec(files_of(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_another_type_is_refused_by_its_key(family):
    """Or by the activation that it names; a key that is not read may have any value."""
    architecture = FAMILIES[family].architecture
    config = {**json.loads(make(family).config.to_json_string()), "architectures": [architecture]}
    for key, value in itertools.product(
        {*config, "rope_theta", "rope_scaling"} - {"architectures"}, ("x", [3])
    ):
        try:
            read_family_spec(family_of([architecture]), {**config, key: value}, Path("folder"))
        except ModelError as error:
            assert key in str(error) or "activation" in str(error)  # noqa: PT017 - success is as good


def test_an_unknown_activation_is_refused_by_name(tmp_path):
    make("granite").save_pretrained(tmp_path)
    change_config(tmp_path, {"hidden_act": "quick_gelu"})
    with pytest.raises(ModelError, match="activation 'quick_gelu' is not supported"):
        read_spec(files_of(tmp_path))


def test_an_activation_that_cannot_gate_is_refused_by_name(tmp_path):
    make("granite").save_pretrained(tmp_path)
    change_config(tmp_path, {"hidden_act": "relu2"})
    with pytest.raises(ModelError, match="activation 'relu2' is not supported in a gated MLP"):
        read_spec(files_of(tmp_path))


@pytest.mark.parametrize("layers", [1, "1", ["1"], [True], {"1": 1}], ids=str)
def test_layers_without_experts_that_are_no_list_are_refused_by_name(layers, tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path)
    change_config(tmp_path, {"mlp_only_layers": layers})
    with pytest.raises(ModelError, match=r"mlp_only_layers is .*, which is not a list of layers"):
        read_spec(files_of(tmp_path))


@pytest.mark.parametrize(
    ("family", "key", "number", "dense_layers"),
    [
        ("qwen3_moe", "decoder_sparse_step", None, []),
        ("qwen3_moe", "decoder_sparse_step", 9, [0, 1]),
        ("qwen3_moe", "mlp_only_layers", None, [0]),
        ("qwen3_moe", "mlp_only_layers", [1, 7, -1], [0, 1]),
        ("glm4_moe", "first_k_dense_replace", None, [0]),
        ("glm4_moe", "first_k_dense_replace", 0, []),
        ("glm4_moe", "first_k_dense_replace", 9, [0, 1]),
    ],
    ids=str,
)
def test_layers_without_experts(family, key, number, dense_layers, tmp_path):
    """Null is the default; a layer that there is not is ignored, as transformers does."""
    make(family).save_pretrained(tmp_path)
    change_config(tmp_path, {key: number, "num_hidden_layers": 2})
    layers = read_spec(files_of(tmp_path)).layers
    assert [index for index, layer in enumerate(layers) if isinstance(layer.mlp, MlpSpec)] == dense_layers


def test_more_experts_than_the_file_can_hold_are_refused_before_they_are_listed(tmp_path, monkeypatch):
    make("qwen3_moe").save_pretrained(tmp_path)
    change_config(tmp_path, {"num_experts": 60_000})
    with pytest.raises(ModelError, match="num_local_experts = 7 and num_experts = 60000 contradict"):
        read_spec(files_of(tmp_path))
    change_config(tmp_path, {"num_experts": 60_000, "num_local_experts": 60_000})
    monkeypatch.setattr("models.loader.place", None)
    with pytest.raises(ModelError, match=r"60000 experts in . layers, .* are [\d,]+ weights, and the checkp"):
        load(files_of(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].make is None])
def test_model_type_names_the_architecture_unless_two_have_it(family):
    """As transformers pairs them, for a config.json without `architectures`."""
    architecture = FAMILIES[family].architecture
    model_type = getattr(transformers, architecture).config_class.model_type
    if architecture.startswith("Gemma3") and model_type == "gemma3":
        with pytest.raises(ModelError, match=f"model_type 'gemma3' is that of .*{architecture}"):
            architectures_of({"model_type": model_type})
    else:
        assert architectures_of({"model_type": model_type, "architectures": None}) == [architecture]


def test_a_tied_head_with_a_bias_is_refused(tmp_path):
    make("phi").save_pretrained(tmp_path)
    change_config(tmp_path, TIED)
    with pytest.raises(ModelError, match="tied to the embedding has no bias"):
        read_spec(files_of(tmp_path))


def test_the_text_model_of_gemma3_with_images(tmp_path):
    make("gemma3 with images").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size", "head_dim", "layer_types"):
        del config["text_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(files_of(tmp_path))
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert spec.vocab_size == 262_208
    assert [layer.attention.window for layer in spec.layers] == [19, 19, 19, 19, 19, 0, 19]


def test_embeddings_are_scaled_as_the_dtype_rounds_it(tmp_path):
    """sqrt(48) is 6.928; Gemma multiplies by 6.9375 in bfloat16."""
    make("gemma").save_pretrained(tmp_path)
    for dtype, scale in ((torch.bfloat16, 6.9375), (torch.float32, 48**0.5)):
        decoder = load(files_of(tmp_path), dtype, CPU)
        assert decoder.embedding._scale == pytest.approx(scale, rel=1e-7)
