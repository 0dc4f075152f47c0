"""Checks that a model runs on this machine, from its configuration and the headers of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from engine.config import EngineConfig
from engine.device.devices import choose_device
from engine.device.kv_cache import cpu_pool_bytes, cuda_pool_bytes, kv_storage, page_bytes, pages_of_pool
from engine.device.runner import choose_max_model_len
from engine.errors import ModelError
from engine.machine import available_memory
from engine.startup import default_token_budget, find
from engine.text.chat_template import read_template
from engine.text.tokenizer import Tokenizer, TokenizerPool
from models import loader
from models.cache import is_fetched
from models.decoder import Decoder
from models.features import features_of, in_words
from models.layers import Linear
from models.memory import num_bytes, num_parameters


@dataclass(frozen=True)
class ModelCheck:
    """A model that runs on this machine, and what it takes.

    `weight_bytes` is the memory of the weights, `kv_token_bytes` that of one token's keys and values in all
    layers. `kv_tokens` fit into the KV pool, beside weights and steps; on a GPU the memory of a step is an
    estimate. `max_model_len` is the context window, or less if the pool is smaller or the settings say so.
    """

    name: str
    path: str
    architecture: str
    features: Mapping[str, tuple[str, ...]]
    num_parameters: int
    dtype: str
    device: str
    quantization: str | None
    weight_bytes: int
    kv_dtype: str
    kv_token_bytes: int
    kv_tokens: int
    context_window: int
    max_model_len: int
    tokenizer: TokenizerPool

    @property
    def description(self) -> str:
        """Return the features as text."""
        return in_words(self.features)


def check_model(config: EngineConfig) -> ModelCheck:
    """Check the model of the settings; blocks. Nothing is fetched, and no weights are read.

    Raises ModelError if the model cannot be loaded, ValueError, naming the setting, if it does not fit into
    memory or a setting cannot be met.
    """
    name = config.model
    if not is_fetched(name, config.cache_dir):
        raise ModelError(f"it is not on this machine; `monoloop pull {name}` fetches it")
    files = find(name, config.cache_dir)
    device = choose_device(config)
    dtype = loader.default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        model, architecture, quantization = loader.outline(files, dtype, quantization=config.quantization)
    except loader.ModelError as error:
        raise ModelError(str(error)) from error
    spec, token_budget = model.spec, config.token_budget or default_token_budget(config)
    weight_bytes = num_bytes(model)
    num_pages = _num_pages(model, config, device, weight_bytes, token_budget)
    max_model_len = choose_max_model_len(spec, config, token_budget, num_pages)
    template = None if config.chat_template is None else read_template(config.chat_template)
    sizes = [layer.attention.num_kv_heads * layer.attention.head_dim for layer in spec.layers]
    return ModelCheck(
        name=files.name,
        path=str(files.weights),
        architecture=architecture,
        features=features_of(spec),
        num_parameters=num_parameters(model),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        quantization=quantization,
        weight_bytes=weight_bytes,
        kv_token_bytes=2 * sum(map(kv_storage(model, config.kv_dtype).num_bytes, sizes)),
        kv_dtype=config.kv_dtype,
        kv_tokens=num_pages // len(spec.kv_groups) * config.page_size,
        context_window=spec.max_position,
        max_model_len=max_model_len,
        tokenizer=TokenizerPool(
            Tokenizer(files.tokenizer_dir, template), num_threads=1, max_model_len=max_model_len
        ),
    )


def _num_pages(
    model: Decoder, config: EngineConfig, device: torch.device, weight_bytes: int, token_budget: int
) -> int:
    """Return the number of pages of the KV pool beside the weights. Raises ValueError if they do not fit."""
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
        step_bytes = _step_bytes(model, token_budget)
        free_bytes = partial(cuda_pool_bytes, left, total, step_bytes, config.gpu_memory_utilization)
    num_pages = pages_of_pool(model, config, device, free_bytes)
    pool_bytes = num_pages * page_bytes(model, config)
    if pool_bytes > left:
        raise ValueError(
            f"kv_tokens: the pool takes {_gib(pool_bytes)}, and beside the weights {_gib(left)} are free on "
            f"{device}"
        )
    return num_pages


def _step_bytes(model: Decoder, token_budget: int) -> int:
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
