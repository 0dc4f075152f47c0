"""A tiny model of each family, made by transformers from random weights, for what must hold of all families.

To add a family, add an entry to FAMILIES, in alphabetical order: the architecture that its config.json names,
and the keys of its configuration, those of BASE unless the family differs. The tests of all families then
run for it. Sizes are odd on purpose: three query heads share a key/value head, head_dim is not hidden_size /
num_heads, the vocabulary is no multiple of 64, windows are shorter than the prompts. Have as many layers as
the family's pattern needs (a full layer and one with a window; a dense one and one with experts), mostly two.

If transformers has no class of that name, give a function `make`. It is called with the keys of the
configuration and returns a module like those of transformers: `module(ids)` has `logits`, and
`save_pretrained(folder)` writes config.json, and the tensors with the names and shapes of the published
checkpoints. Often that is a class of a similar family with another `save_pretrained`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from tests.models.custom_code import make_internlm2, make_internlm3, make_minicpm, make_mxfp4_gpt_oss

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MOE: dict[str, Any] = {
    **BASE,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class TinyFamily:
    """How to make a tiny model. `tolerance` bounds errors of float32 logits, relative to the largest one."""

    architecture: str
    config: dict[str, Any]
    make: Callable[..., Any] | None = None
    # Two float32 models that differ only in the order of their sums are about 1e-6 apart.
    tolerance: float = 2e-5


WINDOW = {**BASE, "sliding_window": 19}
# Some classes derive it from hidden_size / num_attention_heads: 72 / 6.
NARROW = {key: value for key, value in BASE.items() if key != "head_dim"} | {"hidden_size": 72}

GRANITE_MOE = {
    **NARROW,
    "num_local_experts": 5,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.13,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GPT_OSS = {
    **WINDOW,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}

GEMMA3 = {
    **WINDOW,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 24,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def make_gemma3_with_images(**config: Any) -> Any:
    """Return a Gemma 3 of this text configuration with a small vision tower beside it."""
    return with_images("Gemma3", config, mm_tokens_per_image=4)


def make_mistral3(**config: Any) -> Any:
    """Return a Mistral 3 of this text configuration with a small vision tower beside it."""
    text = {"model_type": "mistral", **config}
    return with_images("Mistral3", text, tie_word_embeddings=False)


def with_images(name: str, text: dict[str, Any], **more: Any) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    make_config = getattr(transformers, f"{name}Config")
    whole = make_config(text_config=text, vision_config=vision, **more)
    whole.text_config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForConditionalGeneration")(whole)


FAMILIES = {
    "arcee": TinyFamily("ArceeForCausalLM", NARROW),
    "arcee with biases": TinyFamily("ArceeForCausalLM", {**NARROW, "mlp_bias": True, "attention_bias": True}),
    "cohere": TinyFamily("CohereForCausalLM", {**NARROW, "logit_scale": 0.3, "attention_bias": True}),
    "cohere with qk norm": TinyFamily("CohereForCausalLM", {**NARROW, "use_qk_norm": True}),
    "cohere2": TinyFamily("Cohere2ForCausalLM", {**NARROW, "sliding_window": 19, "num_hidden_layers": 5}),
    "dots1": TinyFamily(
        "Dots1ForCausalLM",
        {
            **WINDOW,
            "num_hidden_layers": 3,
            "max_window_layers": 1,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 5,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    ),
    "ernie4_5": TinyFamily("Ernie4_5ForCausalLM", BASE),
    "ernie4_5 with biases": TinyFamily("Ernie4_5ForCausalLM", {**BASE, "use_bias": True}),
    "exaone4": TinyFamily("Exaone4ForCausalLM", {**WINDOW, "num_hidden_layers": 5}),
    "exaone4 without windows": TinyFamily(
        "Exaone4ForCausalLM", {**BASE, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    ),
    "gemma": TinyFamily("GemmaForCausalLM", {**BASE, "hidden_act": "gelu"}),
    "gemma2": TinyFamily(
        "Gemma2ForCausalLM",
        {
            **WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3": TinyFamily("Gemma3ForCausalLM", GEMMA3),
    "gemma3 with images": TinyFamily("Gemma3ForConditionalGeneration", GEMMA3, make_gemma3_with_images),
    "glm": TinyFamily("GlmForCausalLM", BASE),
    "glm4": TinyFamily("Glm4ForCausalLM", {**BASE, "head_dim": 24}),
    "glm4_moe": TinyFamily(
        "Glm4MoeForCausalLM",
        {
            **BASE,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 5,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": TinyFamily("GptOssForCausalLM", GPT_OSS),
    "gpt_oss in MXFP4": TinyFamily(
        "GptOssForCausalLM", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96}, make_mxfp4_gpt_oss
    ),
    "granite": TinyFamily(
        "GraniteForCausalLM",
        {
            **BASE,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.13,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "mlp_bias": True,
        },
    ),
    "granitemoe": TinyFamily("GraniteMoeForCausalLM", GRANITE_MOE),
    "granitemoeshared": TinyFamily(
        "GraniteMoeSharedForCausalLM", {**GRANITE_MOE, "shared_intermediate_size": 40}
    ),
    "internlm2": TinyFamily("InternLM2ForCausalLM", {**NARROW, "bias": True}, make_internlm2),
    "internlm2 without biases": TinyFamily("InternLM2ForCausalLM", {**NARROW, "bias": False}, make_internlm2),
    "internlm3": TinyFamily(
        "InternLM3ForCausalLM",
        {**BASE, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
        make_internlm3,
    ),
    "internlm3 with biases": TinyFamily("InternLM3ForCausalLM", {**BASE, "bias": True}, make_internlm3),
    "llama": TinyFamily("LlamaForCausalLM", BASE),
    "minicpm": TinyFamily(
        "MiniCPMForCausalLM",
        {**NARROW, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 18},
        make_minicpm,
    ),
    "ministral": TinyFamily(
        "MinistralForCausalLM", {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "ministral3": TinyFamily(
        "Ministral3ForCausalLM",
        {
            **BASE,
            "rope_parameters": MINISTRAL3_ROPE,
        },
    ),
    "mistral": TinyFamily("MistralForCausalLM", {**BASE, "sliding_window": 19}),
    "mistral3": TinyFamily("Mistral3ForConditionalGeneration", BASE, make_mistral3),
    "mistral3 of ministral3": TinyFamily(
        "Mistral3ForConditionalGeneration",
        {**BASE, "model_type": "ministral3", "rope_parameters": MINISTRAL3_ROPE},
        make_mistral3,
    ),
    "mixtral": TinyFamily("MixtralForCausalLM", {**BASE, "sliding_window": 19, "num_local_experts": 5}),
    "nemotron": TinyFamily("NemotronForCausalLM", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "olmo2": TinyFamily("Olmo2ForCausalLM", {**BASE, "attention_bias": True}),
    "olmo3": TinyFamily(
        "Olmo3ForCausalLM",
        {
            **WINDOW,
            "num_hidden_layers": 5,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "olmoe": TinyFamily(
        "OlmoeForCausalLM", {**NARROW, "num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 0.6}
    ),
    "phi": TinyFamily("PhiForCausalLM", NARROW),
    "phi3": TinyFamily("Phi3ForCausalLM", {**NARROW, "sliding_window": 19}),
    "phi4 mini": TinyFamily(
        "Phi3ForCausalLM",
        {
            **NARROW,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 200,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.0, 3.0, 8.0],
            },
        },
    ),
    "qwen2": TinyFamily("Qwen2ForCausalLM", BASE),
    "qwen2 with windows": TinyFamily(
        "Qwen2ForCausalLM", {**BASE, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}
    ),
    "qwen2_moe": TinyFamily(
        "Qwen2MoeForCausalLM",
        {**MOE, "num_hidden_layers": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40}
        | {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 3},
    ),
    "qwen3": TinyFamily("Qwen3ForCausalLM", BASE),
    "qwen3_moe": TinyFamily(
        "Qwen3MoeForCausalLM",
        {**MOE, "num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "seed_oss": TinyFamily("SeedOssForCausalLM", BASE),
    "smollm3": TinyFamily("SmolLM3ForCausalLM", {**NARROW, "num_hidden_layers": 5}),
    "smollm3 with windows": TinyFamily(
        "SmolLM3ForCausalLM",
        {**NARROW, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 19},
    ),
    "stablelm": TinyFamily("StableLmForCausalLM", {**NARROW, "partial_rotary_factor": 0.4}),
    "stablelm in parallel": TinyFamily(
        "StableLmForCausalLM",
        {
            **NARROW,
            "partial_rotary_factor": 0.4,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "qk_layernorm": True,
        },
    ),
    "starcoder2": TinyFamily("Starcoder2ForCausalLM", {**NARROW, "sliding_window": 19}),
    "starcoder2 without biases": TinyFamily(
        "Starcoder2ForCausalLM", {**NARROW, "use_bias": False, "tie_word_embeddings": False}
    ),
}


def make(name: str, architecture: str | None = None, **changes: Any) -> Any:
    """Return a family's model with random weights.

    `architecture` names another class of transformers for it, such as one with a score head; `changes` are
    made to its configuration.
    """
    family = FAMILIES[name]
    config = {**family.config, **changes}
    if family.make is not None and architecture is None:
        return randomised(family.make(**config))
    # Found by name: importing the classes of all families takes seconds.
    model_class = getattr(transformers, architecture or family.architecture)
    made = model_class.config_class(**config)
    made._attn_implementation = "eager"  # the others leave a sliding window out
    return randomised(model_class(made))


def randomised(model: Any) -> Any:
    """Return a model with random weights. Biases and norms start at 0 and 1, which would hide unused ones."""
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor) * 0.2 + (tensor.mean() > 0.5))
    return model.eval()


def prompt(length: int, seed: int = 1, vocab_size: int = BASE["vocab_size"]) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
