"""Writes models with weights of eight bits as tools store them, and computes what their products are."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
LIMITS = {FP8: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Layout:
    """A quantization_config, and the tensors that go with it.

    `scale_shape` is that of n output features: (-1, 1), (-1,), (1,) or (). `input_scale` is the shape of that
    of static inputs. `is_dynamic`: inputs have a scale of each token.
    """

    config: dict[str, Any]
    dtype: torch.dtype
    scale_shape: tuple[int, ...]
    scale_dtype: torch.dtype = torch.float32
    scale_name: str = "weight_scale"
    input_scale: tuple[int, ...] | None = None
    is_dynamic: bool = False

    def store(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the tensors of a weight [n, k], and the values that they stand for."""
        is_of_rows = -1 in self.scale_shape
        largest = weight.abs().amax(1) if is_of_rows else weight.abs().amax()
        scale = (largest / LIMITS[self.dtype]).clamp(min=1e-6).to(self.scale_dtype)
        wide = scale.float()[:, None] if is_of_rows else scale.float()
        values = rounded(weight / wide, self.dtype)
        parts = {"weight": values, self.scale_name: scale.reshape(self.scale_shape)}
        if self.input_scale is not None:
            parts["input_scale"] = torch.full(
                self.input_scale, 5 / LIMITS[self.dtype], dtype=self.scale_dtype
            )
        return parts, values.float() * wide

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return the values that a product has in place of x [..., k]."""
        if self.is_dynamic:
            scale = x.abs().amax(-1, keepdim=True) / LIMITS[self.dtype]
        elif self.input_scale is not None:
            scale = torch.tensor(5 / LIMITS[self.dtype], dtype=self.scale_dtype).float()
        else:
            return x
        return rounded(x / scale, self.dtype).float() * scale


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = LIMITS[dtype]
    x = x.clamp(-limit, limit)
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def write(
    model: nn.Module,
    folder: Path,
    layout: Layout,
    *,
    skip: Callable[[str], bool] = lambda name: name == "lm_head",
    more: dict[str, Tensor] | None = None,
) -> None:
    """Store a model of transformers, whose linears and experts become the values that the tensors stand for.

    Inputs of its linears are rounded from then on, those of experts are not.
    """
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = load_file(path) | (more or {})

    def replace(name: str, weight: Tensor) -> Tensor:
        parts, values = layout.store(weight)
        stored.update({f"{name}.{kind}": tensor for kind, tensor in parts.items()})
        return values

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and not skip(name):
                module.weight.data = replace(name, module.weight.data)
                module.register_forward_pre_hook(lambda _, args: (layout.rounded_input(args[0]), *args[1:]))
            if hasattr(module, "gate_up_proj") and not isinstance(module.gate_up_proj, nn.Module):
                for expert in range(len(module.down_proj)):
                    halves = zip(("gate", "up"), module.gate_up_proj[expert].chunk(2), strict=True)
                    parts = [replace(f"{name}.{expert}.{half}_proj", weight) for half, weight in halves]
                    module.gate_up_proj[expert] = torch.cat(parts)
                    down = module.down_proj[expert]
                    module.down_proj[expert] = replace(f"{name}.{expert}.down_proj", down)
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
