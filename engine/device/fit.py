"""Checks what fits into a device's memory beside the weights of a model that is not loaded yet."""

from functools import partial

import torch

from engine.config import EngineConfig
from engine.device.devices import choose_device, choose_dtype
from engine.device.kv_cache import cpu_pool_bytes, cuda_pool_bytes, page_bytes, pages_of_pool
from engine.device.runner import choose_max_model_len
from engine.errors import ModelError
from engine.machine import available_memory
from models import loader
from models.decoder import Decoder
from models.layers import Linear
from models.memory import num_bytes
from models.model_files import ModelFiles


def check_lengths(config: EngineConfig, files: ModelFiles, token_budget: int) -> None:
    """Check `max_model_len` and `kv_tokens`, where the settings have them, before weights are read; blocks.

    Raises ModelError if the model cannot be loaded; ValueError, naming the setting and the most that fits,
    if one cannot be met. On a GPU the memory of a step is known only once one has run: what is refused here
    does not fit even without it.
    """
    if config.max_model_len is None and config.kv_tokens is None:
        return
    model = outline(config, files).model
    try:
        choose_max_model_len(model.spec, config, token_budget, pages_beside(model, config, 0))
    except ValueError:
        # The message then has the length that is likely to fit beside a step, too.
        num_pages = pages_beside(model, config, step_bytes(model, token_budget))
        choose_max_model_len(model.spec, config, token_budget, num_pages)
        raise


def outline(config: EngineConfig, files: ModelFiles) -> loader.Outline:
    """Return the model that the settings ask for, without its weights. Raises ModelError, ValueError."""
    dtype = choose_dtype(config, choose_device(config))
    try:
        return loader.outline(files, dtype, quantization=config.conversion)
    except loader.ModelError as error:
        raise ModelError(str(error)) from error


def pages_beside(model: Decoder, config: EngineConfig, reserved_bytes: int) -> int:
    """Return the number of pages of the KV pool beside the weights.

    On a GPU `reserved_bytes` stay free for a step. Raises ValueError, naming the setting, if nothing fits.
    """
    device, weight_bytes = choose_device(config), num_bytes(model)
    total = free = available_memory()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    left = free - weight_bytes
    if left < 0:
        raise ValueError(
            f"model: the weights take {_gib(weight_bytes)}, and {_gib(free)} are free on {device}"
        )
    free_bytes = partial(cpu_pool_bytes, left)
    if device.type == "cuda":
        free_bytes = partial(cuda_pool_bytes, left, total, reserved_bytes, config.gpu_memory_utilization)
    num_pages = pages_of_pool(model, config, device, free_bytes)
    size = page_bytes(model, config)
    if num_pages * size > left:
        most = left // size // len(model.spec.kv_groups) * config.page_size
        raise ValueError(
            f"kv_tokens: the pool takes {_gib(num_pages * size)}, and beside the weights {_gib(left)} are "
            f"free on {device}: {most:,} tokens at most"
        )
    return num_pages


def step_bytes(model: Decoder, token_budget: int) -> int:
    """Return about the memory of the largest step: the residual stream, and around the widest linear.

    That linear's output, as much again as the activation makes of it, and the input live at the same time.
    """
    widest = max(
        leaf.shape.out_features
        for path, leaf in model.leaves()
        if isinstance(leaf, Linear) and path != "output"
    )
    num_tokens = min(token_budget, model.spec.max_position)
    return num_tokens * (3 * model.spec.hidden_size + 2 * widest) * model.dtype.itemsize


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
