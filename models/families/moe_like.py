"""Shared by families with experts: names of their tensors, and what their configurations say about them."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from kernels.expert_routing import RouterOptions
from kernels.grouped_linear import GatedActivation
from models.config_values import count, number
from models.errors import ModelError
from models.families.llama_like import refuse_unless
from models.spec import DecoderSpec, MlpSpec, MoeSpec
from models.weight_names import Stacked, Target

# Checkpoints have a tensor for each expert, or stacks as transformers keeps them in memory.
EXPERT_MAP: dict[str, Target] = {
    "model.layers.*.mlp.gate": "layers.*.mlp.router",
    "model.layers.*.mlp.experts.*.gate_proj": "layers.*.mlp.gate_up.*.gate",
    "model.layers.*.mlp.experts.*.up_proj": "layers.*.mlp.gate_up.*.up",
    "model.layers.*.mlp.experts.*.down_proj": "layers.*.mlp.down.*",
    "model.layers.*.mlp.experts.gate_up_proj": Stacked(
        ("layers.*.mlp.gate_up.*.gate.weight", "layers.*.mlp.gate_up.*.up.weight")
    ),
    "model.layers.*.mlp.experts.down_proj": Stacked(("layers.*.mlp.down.*.weight",)),
}


def read_experts(
    spec: DecoderSpec, config: dict[str, Any], router: RouterOptions, shared_size: int = 0, **more: Any
) -> MoeSpec:
    """Return the experts of a configuration, with the activation of the dense blocks of `spec`.

    `shared_size` is the intermediate size of the expert that all tokens use, 0 without one; `more` are fields
    of MoeSpec that the family decides itself.
    """
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MlpSpec)
    assert mlp.activation in ("silu", "gelu", "gelu_tanh")  # those of gated blocks
    # The number has three names; transformers reads and writes more than one of them for some families.
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    found = {name: count(config, name) for name in names if config.get(name) is not None}
    if not found:
        raise KeyError(names[0])
    if len({*found.values()}) > 1:
        raise ModelError(f"{' and '.join(f'{name} = {found[name]}' for name in found)} contradict each other")
    size = count(config, "moe_intermediate_size", mlp.intermediate_size)
    shared = MlpSpec(shared_size, mlp.activation) if shared_size else None
    options = {"activation": GatedActivation(mlp.activation), "shared": shared, **more}
    return MoeSpec(next(iter(found.values())), size, router, **options)


def sigmoid_router(config: dict[str, Any], top_k: int, *, normalize: bool) -> RouterOptions:
    """Return the router of a configuration with the keys of DeepSeek V3: sigmoids, and groups of experts."""
    for key in ("scoring_func", "topk_method"):  # not read by transformers
        refuse_unless(config, key, "sigmoid", "noaux_tc")
    return RouterOptions(
        top_k,
        "sigmoid",
        normalize=normalize,
        scale=number(config, "routed_scaling_factor", 1.0),
        num_groups=count(config, "n_group", 1),
        top_groups=count(config, "topk_group", 1),
    )


def with_experts(spec: DecoderSpec, experts: MoeSpec, dense_layers: Container[int] = ()) -> DecoderSpec:
    """Return the spec with experts in the place of the dense blocks of all layers but `dense_layers`."""
    layers = [
        layer if index in dense_layers else replace(layer, mlp=experts)
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def qwen_dense_layers(config: dict[str, Any]) -> list[int]:
    """Return the layers without experts by the keys of Qwen2MoeConfig and Qwen3MoeConfig."""
    step, dense = count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"mlp_only_layers is {dense!r:.99}, which is not a list of layers")
    return [
        index for index in range(count(config, "num_hidden_layers")) if index in dense or (index + 1) % step
    ]
