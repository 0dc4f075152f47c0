"""How llama.cpp's converter writes each architecture to GGUF: names of tensors, keys, and changed values.

A file is read as the checkpoint that it was made from: its names are translated to the ones in the weight map
of the family, its metadata to the family's configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.errors import ModelError
from models.families import Family, family_of
from models.gguf.metadata import Metadata, base_config
from models.spec import DecoderSpec
from models.weight_names import Stacked, Target

# Names in GGUF and in a checkpoint, without `.weight` or `.bias` and with `*` for the layer.
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "blk.*.attn_norm": "model.layers.*.input_layernorm",
    "blk.*.attn_q": "model.layers.*.self_attn.q_proj",
    "blk.*.attn_k": "model.layers.*.self_attn.k_proj",
    "blk.*.attn_v": "model.layers.*.self_attn.v_proj",
    "blk.*.attn_q_norm": "model.layers.*.self_attn.q_norm",
    "blk.*.attn_k_norm": "model.layers.*.self_attn.k_norm",
    "blk.*.attn_output": "model.layers.*.self_attn.o_proj",
    "blk.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_gate": "model.layers.*.mlp.gate_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.up_proj",
    "blk.*.ffn_down": "model.layers.*.mlp.down_proj",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_SANDWICH_NORMS = {
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}
# Addresses of tensors whose counterparts in checkpoints have another layout or an odd name.
_EXPERTS: dict[str, Target] = {
    "blk.*.ffn_gate_inp": "layers.*.mlp.router",
    "blk.*.ffn_gate_exps": Stacked(("layers.*.mlp.gate_up.*.gate",)),
    "blk.*.ffn_up_exps": Stacked(("layers.*.mlp.gate_up.*.up",)),
    "blk.*.ffn_down_exps": Stacked(("layers.*.mlp.down.*",)),
}
_SINKS: dict[str, Target] = {"blk.*.attn_sinks.weight": "layers.*.attention.sinks.sinks"}
# Read into the configuration, or into the spec.
_NOT_WEIGHTS = ("rope_freqs", "rope_factors_long", "rope_factors_short")


@dataclass(frozen=True)
class Conversion:
    """How the architecture `name` of Hugging Face is written to GGUF.

    `tensors` are names beyond the common ones. `config` translates the metadata; `restore` undoes what the
    conversion did to the tensor at an address of the decoder.
    """

    name: str
    tensors: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Metadata], dict[str, Any]] = base_config
    restore: Callable[[str, Tensor, DecoderSpec], Tensor] = lambda _address, tensor, _spec: tensor

    @property
    def family(self) -> Family:
        """The family that reads the configuration."""
        return family_of([self.name])

    def weight_map(self) -> dict[str, Target]:
        """Return the family's weight map by GGUF names."""
        targets = self.family.WEIGHT_MAP
        names = _TENSORS | dict(self.tensors)
        found = {name: targets[other] for name, other in names.items() if other in targets}
        return found | _EXPERTS | _SINKS | dict.fromkeys(_NOT_WEIGHTS)


def _with_halves_apart(address: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Bring the rows of q and k from GGUF's order (rotated pairs adjacent) to ours (halves apart)."""
    if ".attention.qkv.v." in address or ".attention.qkv." not in address:
        return tensor
    pairs = tensor.reshape(-1, spec.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _without_offset(address: str, tensor: Tensor, _spec: DecoderSpec) -> Tensor:
    """Subtract the 1 that the conversion added to the weights of norms."""
    return tensor - 1 if address.endswith("norm.weight") else tensor


def _refuse_partial_rotation(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration. Raises ModelError if rows are in an order that is not undone here."""
    if "partial_rotary_factor" in config:
        raise ModelError(
            "RoPE of a part of each head (rope.dimension_count below attention.key_length) is not supported "
            "for this architecture"
        )
    return config


def _llama(metadata: Metadata) -> dict[str, Any]:
    return _refuse_partial_rotation(base_config(metadata))


def _with_experts(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return config | {
        "num_local_experts": metadata["expert_count"],
        "num_experts_per_tok": metadata["expert_used_count"],
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    return _with_experts(metadata, _llama(metadata))


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    """All layers have experts, whose weights are normalised."""
    return _with_experts(metadata, base_config(metadata)) | {
        "moe_intermediate_size": metadata["expert_feed_forward_length"],
        "norm_topk_prob": metadata.get("expert_weights_norm", True),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """The ramp of YaRN is not rounded to whole elements, which no key says."""
    config = _with_experts(metadata, base_config(metadata))
    config["intermediate_size"] = metadata["expert_feed_forward_length"]
    config["rope_parameters"]["truncate"] = False
    return config


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """YaRN with a factor on queries that grows with their position."""
    config = _refuse_partial_rotation(base_config(metadata, "scaling.yarn_log_multiplier"))
    scale = metadata.get("rope.scaling.yarn_log_multiplier")
    beta = metadata.get("attention.temperature_scale")
    config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}
    return config


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """Factors of long contexts are tensors, added to the configuration by the checkpoint."""
    config = base_config(metadata, "scaling.attn_factor")
    original = metadata.get("rope.scaling.original_context_length")
    config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    config["rope_parameters"]["attention_factor"] = metadata.get("rope.scaling.attn_factor")
    return config


# Layers of the models whose scores are not scaled by the size of a head but by that of all heads together,
# which no key says.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _gemma_scale(config: dict[str, Any], layers_of_27b: int) -> int:
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    config = base_config(metadata)
    return config | {
        "query_pre_attn_scalar": _gemma_scale(config, _GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Layers with a window have a rotary base of their own, and no scaling."""
    config = base_config(metadata, "freq_base_swa")
    local = {"rope_theta": metadata.get("rope.freq_base_swa", 10_000.0)}
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = ["full_attention", "sliding_attention"]
        config["layer_types"] = [kinds[bool(has_window)] for has_window in pattern]
    else:
        config["sliding_window_pattern"] = pattern
    return config | {
        "query_pre_attn_scalar": _gemma_scale(config, _GEMMA3_27B_LAYERS),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


_OUTPUT_NORM = {"blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm"}
_PACKED = {
    "blk.*.attn_qkv": "model.layers.*.self_attn.qkv_proj",
    "blk.*.ffn_up": "model.layers.*.mlp.gate_up_proj",
}

_CONVERSIONS = {
    "gemma": Conversion("GemmaForCausalLM", restore=_without_offset),
    "gemma2": Conversion("Gemma2ForCausalLM", _SANDWICH_NORMS, _gemma2, _without_offset),
    "gemma3": Conversion("Gemma3ForCausalLM", _SANDWICH_NORMS, _gemma3, _without_offset),
    "gpt-oss": Conversion("GptOssForCausalLM", _OUTPUT_NORM, _gpt_oss),
    "llama": Conversion("LlamaForCausalLM", config=_llama, restore=_with_halves_apart),
    "mistral3": Conversion("Ministral3ForCausalLM", config=_mistral3, restore=_with_halves_apart),
    "phi3": Conversion("Phi3ForCausalLM", _PACKED, _phi3),
    "qwen2": Conversion("Qwen2ForCausalLM"),
    "qwen3": Conversion("Qwen3ForCausalLM"),
    "qwen3moe": Conversion("Qwen3MoeForCausalLM", config=_qwen3moe),
}
_LLAMA_WITH_EXPERTS = Conversion("MixtralForCausalLM", config=_mixtral, restore=_with_halves_apart)


def conversion_of(metadata: Mapping[str, Any]) -> Conversion:
    """Return how the file of this metadata was written. Raises ModelError for an unknown architecture."""
    name = str(metadata.get("general.architecture", "")) or "(none named)"
    if name not in _CONVERSIONS:
        raise ModelError(
            f"architecture {name} is not supported in GGUF files; supported: {', '.join(_CONVERSIONS)}"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return _LLAMA_WITH_EXPERTS
    return _CONVERSIONS[name]


def registered_gguf_names() -> frozenset[str]:
    """Return the architectures that GGUF files may name."""
    return frozenset(_CONVERSIONS)


def gguf_names_of(name: str) -> tuple[str, ...]:
    """Return the names in GGUF of the architectures read by the family of a Hugging Face architecture."""
    family = family_of([name])
    conversions = [*_CONVERSIONS.items(), ("llama", _LLAMA_WITH_EXPERTS)]
    return tuple(gguf for gguf, conversion in conversions if conversion.family is family)
