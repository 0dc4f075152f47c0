"""Our decoder against transformers on the same weights: variants of Llama's layers, GGUF files, a real model.

What must hold of every family is in test_families.py.
"""

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.loader import load
from tests.models.families import make, prompt, randomised
from tests.models.gguf_files import write_gguf
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS = {
    "mha": {},
    "gqa 4": {"num_key_value_heads": 1},
    "gqa 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "head_dim": {"head_dim": 20, "num_key_value_heads": 2},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope yarn": {"rope_parameters": YARN},
}
QWEN_WINDOWS = [
    {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    {"use_sliding_window": False, "sliding_window": 19, "max_window_layers": 1},
]
CLASSIFIERS = {
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
}
# Two float32 models that differ in the order of their sums only: about 1e-6 of logits of size 1.
TOLERANCE = 2e-5


def assert_parity(model, folder, chunks=None):
    decoder = load(files_of(folder), torch.float32, CPU)
    ids = prompt(70)
    expected = transformers_logits(model, ids)
    found = forward_logits(decoder, ids, chunks)
    worst = (found - expected).abs().max().item() / expected.abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst:.1e} of the largest"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_llama_variants(variant, tmp_path):
    model = randomised(LlamaForCausalLM(LlamaConfig(**{**BASE, **variant})))
    model.save_pretrained(tmp_path)
    assert_parity(model, tmp_path)


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_scores_of_a_sequence_classification_head(family, num_labels, tied, tmp_path):
    """transformers returns those of the last token. A head has no language model head to tie."""
    model = make(family, CLASSIFIERS[family], num_labels=num_labels, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    decoder = load(files_of(tmp_path), torch.float32, CPU)
    assert decoder.spec.num_labels == num_labels
    ids = prompt(70)
    expected = transformers_logits(model, ids)
    for chunks in (None, [16, 16, 38], [69, 1]):
        torch.testing.assert_close(forward_logits(decoder, ids, chunks)[-1], expected, rtol=1e-5, atol=1e-4)


def test_the_score_head_computes_in_float32(tmp_path):
    model = make("llama", CLASSIFIERS["llama"], num_labels=1)
    model.save_pretrained(tmp_path)
    decoder = load(files_of(tmp_path), torch.bfloat16, CPU)
    hidden = torch.randn(3, decoder.spec.hidden_size, dtype=torch.bfloat16)
    torch.testing.assert_close(decoder.score(hidden), hidden.float() @ model.score.weight.T)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 3}),
        *((family, changes) for family in ("qwen2", "qwen3") for changes in QWEN_WINDOWS),
    ],
    ids=str,
)
def test_qwen_variants(family, changes, tmp_path):
    model = make(family, **changes)
    model.save_pretrained(tmp_path)
    assert_parity(model, tmp_path, [30, 1, 1, 38])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_types"]  # as in checkpoints that an older transformers wrote
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert_parity(model, tmp_path)


def test_sharded_checkpoint(tmp_path):
    model = randomised(LlamaForCausalLM(LlamaConfig(**BASE)))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_parity(model, tmp_path)


def test_gguf_rope_freqs(tmp_path):
    """Llama 3.1 files carry the scaling of their frequencies as a tensor of divisors."""
    config = LlamaConfig(**{**BASE, "rope_parameters": LLAMA3})
    model = randomised(LlamaForCausalLM(config))
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    divisors = plain / model.model.rotary_emb.inv_freq
    assert divisors.max() > 2, "the scaling does nothing here, and so the test would not either"
    assert_parity(model, write_gguf(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": divisors}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_equals_cpu(family, dtype, tmp_path):
    """Same weights, the Triton kernels instead of their twins."""
    model = make(family, hidden_size=384, head_dim=64)  # six heads
    model.save_pretrained(tmp_path)
    ids, chunks = prompt(70), [30, 1, 39]
    exact = transformers_logits(model, ids)
    cpu = (forward_logits(load(files_of(tmp_path), dtype, CPU), ids, chunks) - exact).abs().mean().item()
    cuda = load(files_of(tmp_path), dtype, torch.device("cuda"))
    gpu = (forward_logits(cuda, ids, chunks) - exact).abs().mean().item()
    bound = 2 * cpu + 1e-5 * exact.abs().mean().item()
    assert gpu < bound, f"mean error on the GPU {gpu:.2e}, on the CPU {cpu:.2e}"


@pytest.mark.slow
def test_smollm2_logits(smollm, smollm_reference):
    """The real weights, dequantised and brought into order twice: here, and by the gguf package."""
    decoder = load(smollm, torch.float32, CPU)
    model = smollm_reference
    assert dataclasses.asdict(decoder.spec)["vocab_size"] == model.config.vocab_size
    ids = prompt(100, vocab_size=49152)
    expected, found = transformers_logits(model, ids), forward_logits(decoder, ids, [64, 1, 35])
    worst = (found - expected).abs().max().item()
    assert worst < 1e-3, f"logits differ by {worst:.1e}"
