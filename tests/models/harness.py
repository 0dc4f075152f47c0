"""Drives a decoder without an engine, and builds transformers models to hold it against."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.model_files import ModelFiles

PAGE_SIZE = 16
CPU = torch.device("cpu")


def files_of(weights: Path) -> ModelFiles:
    """A checkpoint without a tokenizer, as far as the loader is concerned."""
    return ModelFiles(
        name="test",
        weights=weights,
        format="gguf" if weights.suffix == ".gguf" else "safetensors",
        tokenizer_dir=weights,
        generation_defaults={},
        eos_token_ids=(),
    )


def forward_logits(
    decoder: Decoder,
    token_ids: list[int],
    chunks: list[int] | None = None,
    hidden_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [num_tokens, vocab_size] of one sequence on the CPU, computed in chunks of these lengths.

    With hidden_indices, those of these tokens of each chunk.

    Of a model with a score head they are the scores, [num_tokens, num_labels].
    """
    spec, device = decoder.spec, decoder.device
    head = decoder.score if spec.num_labels else decoder.logits
    num_pages = -(-len(token_ids) // PAGE_SIZE)
    # Pages in descending order, so that a slot is never its position.
    page_table = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)[None]
    kv = []
    for layer in spec.layers:
        num_kv_heads = layer.attention.num_kv_heads // decoder.shard.world
        shape = (num_pages, PAGE_SIZE, num_kv_heads, layer.attention.head_dim)
        kv.append(KVLayer(*(torch.full(shape, torch.nan, dtype=decoder.dtype, device=device) for _ in "kv")))
    found, start = [], 0
    with torch.inference_mode():
        for length in chunks or [len(token_ids)]:
            positions = torch.arange(start, start + length, device=device)
            pages = page_table[0, positions // PAGE_SIZE].long()
            attention = AttentionBatch(
                page_table=page_table,
                query_start=torch.tensor([0, length], dtype=torch.int32, device=device),
                context_lens=torch.tensor([start + length], dtype=torch.int32, device=device),
                slot_mapping=pages * PAGE_SIZE + positions % PAGE_SIZE,
                num_decode_rows=int(length == 1),
                query_lens=[length],
                context_lens_host=[start + length],
            )
            of_groups = (attention,) * len(spec.kv_groups)
            ids = torch.tensor(token_ids[start : start + length], device=device)
            found.append(
                head(
                    decoder(ForwardBatch(ids, positions, of_groups, hidden_indices=hidden_indices), kv)
                ).cpu()
            )
            start += length
    assert start == len(token_ids)
    return torch.cat(found)


def transformers_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [num_tokens, vocab_size] of one sequence."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def to_gguf_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter leaves them: the two halves of a head interleaved."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def from_gguf_order(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of `to_gguf_order`."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


GGUF_TO_HF = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def transformers_llama(path: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A transformers model from a tied Llama .gguf file, through the gguf package alone.

    transformers' own loading of .gguf files needs accelerate, which nothing else here does.
    """
    reader = gguf.GGUFReader(path)

    def value(key):
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                values = from_gguf_order(values, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{GGUF_TO_HF[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        state[name] = torch.from_numpy(np.array(values)).to(dtype)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    # Built on meta, so its frequencies are, too.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()
