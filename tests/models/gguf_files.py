"""Writes models of transformers to GGUF files as llama.cpp's converter does, with the names of gguf."""

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
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
# Architectures whose rows of q and k change their order.
PERMUTED = {"llama"}


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
        values = tensor.detach().float().numpy()
        quantized = kind if values.ndim > 1 else Type.F32
        writer.add_tensor(tensor_name, gguf.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}*.gguf"))


def write_config(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config, head_dim = model.config, model.model.layers[0].self_attn.head_dim
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)


def converted(model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> dict[str, torch.Tensor]:
    """Return the model's tensors under their GGUF names, in GGUF's layout."""
    config = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type in PERMUTED and (module := name.split(".")[-2]) in heads:
            tensor = torch.from_numpy(np.array(to_gguf_order(tensor.numpy(), heads[module])))
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        found[gguf_name] = tensor
    return found
