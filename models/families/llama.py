"""Llama 1 to 3.x and models of the same architecture: SmolLM2, TinyLlama, Yi, Mistral."""

from typing import Any

from torch import Tensor

from models.families.llama_like import GGUF_WEIGHT_MAP, WEIGHT_MAP, gguf_config, read_spec
from models.spec import DecoderSpec

__all__ = ["GGUF_WEIGHT_MAP", "WEIGHT_MAP", "from_gguf", "gguf_config", "spec"]


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a LlamaConfig or MistralConfig as in config.json."""
    bias = bool(config.get("attention_bias", False))
    return read_spec(config, qkv_bias=bias, output_bias=bias)


def from_gguf(address: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Bring the rows of q and k from GGUF's order (rotated pairs adjacent) to ours (halves apart)."""
    if ".attention.qkv.v." in address or ".attention.qkv." not in address:
        return tensor
    pairs = tensor.reshape(-1, spec.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
