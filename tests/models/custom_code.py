"""Tiny models of families that transformers has no class for: a similar class, saved with other names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

INTERNLM2_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "lm_head": "output",
}


def saved_as(model: Any, config: dict[str, Any], tensors: Callable[[], dict[str, torch.Tensor]]) -> Any:
    """Let the model's `save_pretrained` write this config.json and the tensors as they are then."""

    def save_pretrained(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.clone() for name, tensor in tensors().items()}, folder / "model.safetensors")

    model.save_pretrained = save_pretrained
    return model


def make_minicpm(*, scale_emb: float, scale_depth: float, dim_model_base: int, **config: Any) -> Any:
    """Return a Granite with MiniCPM's multipliers.

    MiniCPM multiplies residual additions by scale_depth / sqrt(num_hidden_layers), and divides the input of
    its head by hidden_size / dim_model_base. Its scores have the usual scale.
    """
    made = transformers.GraniteConfig(
        **config,
        tie_word_embeddings=True,
        embedding_multiplier=scale_emb,
        residual_multiplier=scale_depth / config["num_hidden_layers"] ** 0.5,
        logits_scaling=config["hidden_size"] / dim_model_base,
        attention_multiplier=(config["hidden_size"] / config["num_attention_heads"]) ** -0.5,
    )
    model = transformers.GraniteForCausalLM(made)
    config |= {"scale_emb": scale_emb, "scale_depth": scale_depth, "dim_model_base": dim_model_base}

    def tensors() -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}

    return saved_as(model, {"architectures": ["MiniCPMForCausalLM"], **config}, tensors)


def make_internlm2(*, bias: bool, **config: Any) -> Any:
    """Return a Llama that is saved under InternLM2's names.

    Of each key/value head, wqkv has the rows of its queries, then those of k and v.
    """
    made = transformers.LlamaConfig(**config, attention_bias=bias)
    model = transformers.LlamaForCausalLM(made)

    def grouped(state: dict[str, torch.Tensor], prefix: str, kind: str) -> torch.Tensor:
        q, k, v = (
            state.pop(f"{prefix}.{part}_proj.{kind}").unflatten(0, (config["num_key_value_heads"], -1))
            for part in "qkv"
        )
        return torch.cat((q, k, v), dim=1).flatten(0, 1)

    def tensors() -> dict[str, torch.Tensor]:
        state = dict(model.state_dict())
        for layer in range(config["num_hidden_layers"]):
            for kind in ("weight", "bias") if bias else ("weight",):
                packed = grouped(state, f"model.layers.{layer}.self_attn", kind)
                state[f"model.layers.{layer}.attention.wqkv.{kind}"] = packed
        renamed = {}
        for name, tensor in state.items():
            for theirs, ours in INTERNLM2_NAMES.items():
                name = name.replace(theirs, ours)
            renamed[name] = tensor
        return renamed

    return saved_as(model, {"architectures": ["InternLM2ForCausalLM"], **config, "bias": bias}, tensors)


def make_internlm3(*, bias: bool = False, **config: Any) -> Any:
    """Return a Llama that is saved as an InternLM3, whose keys for biases are `qkv_bias` and `bias`."""
    made = transformers.LlamaConfig(**config, rms_norm_eps=1e-5, attention_bias=bias, mlp_bias=bias)
    model = transformers.LlamaForCausalLM(made)
    named = {"architectures": ["InternLM3ForCausalLM"], **config, "qkv_bias": bias, "bias": bias}
    return saved_as(model, named, lambda: dict(model.state_dict()))


def make_mxfp4_gpt_oss(**config: Any) -> Any:
    """Return a gpt-oss that is saved with its experts in MXFP4, to which saving rounds its own weights."""
    made = transformers.GptOssConfig(**config)
    made._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(made)
    saved = made.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }

    def tensors() -> dict[str, torch.Tensor]:
        state = dict(model.state_dict())
        for name in list(state):
            if name.endswith(("gate_up_proj", "down_proj")):
                weight = state.pop(name)
                blocks, scales, rounded = to_mxfp4(weight.transpose(1, 2))
                weight.copy_(rounded.transpose(1, 2))
                state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return state

    return saved_as(model, saved, tensors)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks [..., num_blocks, 16], scales [..., num_blocks] and the rounded values of a weight."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - values).abs().argmin(-1)
    rounded = values[codes] * exponents.exp2()[..., None]
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8), rounded.flatten(-2)
