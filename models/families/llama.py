"""Llama 1 to 3.x and what shares its architecture: SmolLM2, TinyLlama, Yi, Mistral."""

from typing import Any

from torch import Tensor

from models.errors import ModelError
from models.rope import RopeSpec, parse_scaling
from models.spec import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

WEIGHT_MAP: dict[str, str | None] = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "layers.*.attention_norm",
    "model.layers.*.self_attn.q_proj": "layers.*.attention.qkv.q",
    "model.layers.*.self_attn.k_proj": "layers.*.attention.qkv.k",
    "model.layers.*.self_attn.v_proj": "layers.*.attention.qkv.v",
    "model.layers.*.self_attn.o_proj": "layers.*.attention.output",
    "model.layers.*.self_attn.rotary_emb": None,  # older checkpoints store the frequencies
    "model.layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "model.layers.*.mlp.gate_proj": "layers.*.mlp.gate_up.gate",
    "model.layers.*.mlp.up_proj": "layers.*.mlp.gate_up.up",
    "model.layers.*.mlp.down_proj": "layers.*.mlp.down",
    "model.norm": "norm",
    "lm_head": "output",
}

GGUF_WEIGHT_MAP: dict[str, str | None] = {
    "token_embd": "embedding",
    "blk.*.attn_norm": "layers.*.attention_norm",
    "blk.*.attn_q": "layers.*.attention.qkv.q",
    "blk.*.attn_k": "layers.*.attention.qkv.k",
    "blk.*.attn_v": "layers.*.attention.qkv.v",
    "blk.*.attn_output": "layers.*.attention.output",
    "blk.*.ffn_norm": "layers.*.mlp_norm",
    "blk.*.ffn_gate": "layers.*.mlp.gate_up.gate",
    "blk.*.ffn_up": "layers.*.mlp.gate_up.up",
    "blk.*.ffn_down": "layers.*.mlp.down",
    "output_norm": "norm",
    "output": "output",
    "rope_freqs": None,  # read into the spec
}

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def spec(config: dict[str, Any]) -> DecoderSpec:
    """Read a LlamaConfig or MistralConfig as it stands in config.json."""
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ModelError(f"activation '{activation}' is not supported; supported: {', '.join(_ACTIVATIONS)}")
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        qkv_bias=bias,
        output_bias=bias,
        window=int(config.get("sliding_window") or 0),
    )
    mlp = MlpSpec(
        int(config["intermediate_size"]), _ACTIVATIONS[activation], bool(config.get("mlp_bias", False))
    )
    max_position = int(config.get("max_position_embeddings", 2048))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    return DecoderSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        max_position=max_position,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope=RopeSpec(theta, head_dim, parse_scaling(rope, max_position)),
        layers=(LayerSpec(attention, mlp),) * int(config["num_hidden_layers"]),
    )


def gguf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Translate the `llama.*` keys of a GGUF file to the configuration it was converted from."""

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"llama.{key}", default)

    rope: dict[str, Any] = {"rope_theta": value("rope.freq_base", 10_000.0)}
    if (kind := value("rope.scaling.type", "none")) != "none":
        rope["rope_type"] = kind
        rope["factor"] = value("rope.scaling.factor")
        rope["original_max_position_embeddings"] = value("rope.scaling.original_context_length")
    return {
        "vocab_size": value("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length") or value("rope.dimension_count"),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon", 1e-6),
        "sliding_window": value("attention.sliding_window"),
        "rope_parameters": rope,
    }


def from_gguf(slot: str, tensor: Tensor, spec: DecoderSpec) -> Tensor:
    """Bring the rows of q and k from GGUF's order (rotated pairs adjacent) to ours (halves apart)."""
    if ".attention.qkv.v." in slot or ".attention.qkv." not in slot:
        return tensor
    pairs = tensor.reshape(-1, spec.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
