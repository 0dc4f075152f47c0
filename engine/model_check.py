"""Checks that a model runs on this machine, from its configuration and the headers of its tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.device.devices import choose_device
from engine.device.fit import outline, pages_beside, step_bytes
from engine.device.formats import with_formats
from engine.device.kv_cache import kv_storage
from engine.device.runner import choose_max_model_len
from engine.errors import ModelError, NotFetched
from engine.machine_check import obstacle_to_writing
from engine.startup import default_token_budget, find
from engine.text.chat_template import read_template
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_pool import TokenizerPool
from models.cache import fetch_folder, is_fetched
from models.features import features_of, in_words
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

    Raises NotFetched, or ModelError if the model cannot be loaded, or ValueError, naming the setting, if it
    does not fit into memory or a setting cannot be met.
    """
    name = config.model
    template = None if config.chat_template is None else read_template(config.chat_template)
    if not is_fetched(name, config.cache_dir):
        folder = fetch_folder(name, config.cache_dir)
        if obstacle := obstacle_to_writing(folder):
            raise ModelError(f"it is not on this machine, and cannot be fetched into {folder} ({obstacle})")
        raise NotFetched(f"it is not on this machine; `monoloop pull {name}` fetches it")
    files = find(name, config.cache_dir)
    config = with_formats(config, files, choose_device(config))
    model, architecture, quantization = outline(config, files)
    spec, token_budget = model.spec, config.token_budget or default_token_budget(config)
    num_pages = pages_beside(model, config, step_bytes(model, token_budget))
    max_model_len = choose_max_model_len(spec, config, token_budget, num_pages)
    sizes = [layer.attention.num_kv_heads * layer.attention.head_dim for layer in spec.layers]
    return ModelCheck(
        name=files.name,
        path=str(files.weights),
        architecture=architecture,
        features=features_of(spec),
        num_parameters=num_parameters(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(choose_device(config)),
        quantization=quantization,
        weight_bytes=num_bytes(model),
        kv_token_bytes=2 * sum(map(kv_storage(model, config.kv_dtype).num_bytes, sizes)),
        kv_dtype=config.kv_dtype,
        kv_tokens=num_pages // len(spec.kv_groups) * config.page_size,
        context_window=spec.max_position,
        max_model_len=max_model_len,
        tokenizer=TokenizerPool(
            Tokenizer(files.tokenizer_dir, template), num_threads=1, max_model_len=max_model_len
        ),
    )
