"""Writes models of transformers to GGUF files as llama.cpp's converter does, with the names of gguf."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from transformers import PreTrainedModel

from tests.models.harness import to_gguf_order

# By `model_type` of transformers: the architecture in the gguf package.
ARCHITECTURES = {
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
# Model types whose rows of q and k change their order.
PERMUTED = {"llama", "ministral3", "mistral", "mixtral"}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Type = Type.F32,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """Write a tiny model and return its file, or the first of its parts.

    Matrices are of the type `kind`. `tensors` are added, by GGUF name; `metadata` is, too, with the
    architecture's prefix left out.
    """
    architecture = ARCHITECTURES[model.config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = GGUFWriter(path, name, split_max_tensors=tensors_per_part)
    write_config(writer, model)
    for key, value in (metadata or {}).items():
        writer.add_key_value(f"{name}.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{index}>" for index in range(model.config.vocab_size)])
    writer.add_token_scores([0.0] * model.config.vocab_size)
    for tensor_name, tensor in (converted(model, architecture) | (tensors or {})).items():
        values = np.ascontiguousarray(tensor.detach().float().numpy())
        quantized = kind if is_matrix(tensor_name, tensor) else Type.F32
        writer.add_tensor(tensor_name, gguf.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}*.gguf"))


def write_config(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config, head_dim = model.config, model.model.layers[0].self_attn.head_dim
    rope = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("gpt_oss", "mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("gpt_oss", "qwen3_moe"):
        size = config.intermediate_size if config.model_type == "gpt_oss" else config.moe_intermediate_size
        writer.add_expert_feed_forward_length(size)
    if config.model_type == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
    else:
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        return  # the base is the default
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    writer.add_rope_freq_base(rope["rope_theta"])


def converted(model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> dict[str, torch.Tensor]:
    """Return the model's tensors under their GGUF names, in GGUF's layout."""
    config = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in flattened(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type in PERMUTED and (module := name.split(".")[-2]) in heads:
            tensor = torch.from_numpy(np.array(to_gguf_order(tensor.numpy(), heads[module])))
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        found[gguf_name if gguf_name.endswith((".weight", ".bias")) else f"{gguf_name}.weight"] = tensor
    if config.rope_parameters.get("rope_type") == "longrope":
        for key in ("long", "short"):
            found[f"rope_factors_{key}.weight"] = torch.tensor(config.rope_parameters[f"{key}_factor"])
    return found


def is_matrix(name: str, tensor: torch.Tensor) -> bool:
    """Return True for weights that are quantized: also those of experts, but not their biases."""
    return tensor.ndim > 1 and not name.endswith("bias")


def flattened(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with the stacks of experts under the names and in the layout of the converter."""
    for name, tensor in state.items():
        stem, found, kind = name.partition(".mlp.experts.")
        if not found:
            yield name, tensor
            continue
        is_gpt_oss = f"{stem}.mlp.experts.gate_up_proj_bias" in state
        suffix = "bias" if kind.endswith("bias") else "weight"
        if is_gpt_oss and suffix == "weight":
            tensor = tensor.mT
        if kind.startswith("down"):
            yield f"{stem}{found}down_proj.{suffix}", tensor
        else:
            halves = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
            for half, part in zip(("gate_proj", "up_proj"), halves, strict=True):
                yield f"{stem}{found}{half}.{suffix}", part.contiguous()


def gguf_state(path: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state dict for a model of Gemma, read from a file through the gguf package alone."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    architecture = ARCHITECTURES[model.config.model_type]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    state = {}
    for name in model.state_dict():
        stored = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        tensor = tensors[names.get_name(stored, try_suffixes=(".weight",))]
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        state[name] = torch.from_numpy(values - 1 if name.endswith("norm.weight") else values)
    return state
