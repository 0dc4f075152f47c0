"""Checks of models without loading them: sizes, memory, and the reasons against one.

Covers engine/device/fit.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import check_model, startup
from engine.config import EngineConfig
from engine.device import kv_cache
from engine.device.fit import check_lengths
from engine.device.runner import ModelRunner
from engine.errors import ModelError
from engine.startup import find
from models.loader import load, outline
from models.memory import num_bytes, num_parameters
from tests.engine.tiny_engine import tiny_tokenizer
from tests.models.families import FAMILIES, make
from tests.models.harness import files_of

GIB = 2**30


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny Mistral with a tokenizer and a chat template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    make("mistral", vocab_size=331).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def config(folder: Path, **settings) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings)


def set_memory(monkeypatch, num_bytes: int) -> None:
    monkeypatch.setattr("engine.device.fit.available_memory", lambda: num_bytes)


def test_what_a_model_takes(checkpoint):
    found = check_model(config(checkpoint))
    model = make("mistral", vocab_size=331)
    assert found.architecture == "MistralForCausalLM"
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (found.dtype, found.device) == ("float32", "cpu")
    angles = 256 * 20 * 4  # of each position, float32
    assert found.weight_bytes == 4 * found.num_parameters + angles
    assert found.kv_token_bytes == 2 * 2 * 2 * 20 * 4  # keys and values, layers, heads, head_dim, float32
    assert found.context_window == found.max_model_len == 256
    assert found.features == {"attention": ("window 19",)}
    assert found.tokenizer.chat_template is not None


def test_the_pool_is_the_one_that_an_engine_would_make(checkpoint, monkeypatch):
    """The engine looks at free memory after the weights are loaded, the check before."""
    free = 4 * 10**6
    monkeypatch.setattr(kv_cache, "available_memory", lambda: free)
    settings = config(checkpoint)
    runner = ModelRunner.load(settings, find(settings.model, None), token_budget=512)
    set_memory(monkeypatch, free + check_model(settings).weight_bytes)
    found = check_model(settings)
    assert found.kv_tokens == runner.num_kv_tokens < 5000
    assert found.max_model_len == runner.max_model_len


def test_int8_takes_less_than_half_of_float32(checkpoint):
    dense, converted = check_model(config(checkpoint)), check_model(config(checkpoint, quantization="int8"))
    assert converted.weight_bytes < 0.6 * dense.weight_bytes
    assert converted.num_parameters == dense.num_parameters
    assert (dense.quantization, converted.quantization) == (None, "int8")


def test_a_gpu_is_asked_for_its_memory(checkpoint, monkeypatch):
    gpu = torch.device("cuda", 0)
    for module in ("model_check", "device.fit"):
        monkeypatch.setattr(f"engine.{module}.choose_device", lambda config: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    settings = EngineConfig(model=str(checkpoint), token_budget=512)
    found = check_model(settings)
    assert (found.device, found.dtype) == ("cuda:0", "bfloat16")
    assert found.kv_tokens * found.kv_token_bytes == pytest.approx(0.92 * GIB, rel=0.01)
    half = check_model(settings.model_copy(update={"gpu_memory_utilization": 0.75}))
    assert half.kv_tokens * half.kv_token_bytes == pytest.approx(0.5 * GIB, rel=0.01)


def test_weights_that_do_not_fit(checkpoint, monkeypatch):
    set_memory(monkeypatch, 10_000)
    with pytest.raises(
        ValueError, match=r"^model: the weights take 0\.00 GiB, and 0\.00 GiB are free on cpu"
    ):
        check_model(config(checkpoint))


def test_settings_that_cannot_be_met(checkpoint, monkeypatch):
    set_memory(monkeypatch, 4 * 10**6)
    with pytest.raises(
        ValueError, match=r"^kv_tokens: the pool takes .* beside the weights .* on cpu: \d,\d+ "
    ):
        check_model(config(checkpoint, kv_tokens=10**6))
    with pytest.raises(ValueError, match=r"^max_model_len: 300 is more than the model's context window"):
        check_model(config(checkpoint, max_model_len=300))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 10**6}, r"^kv_tokens: the pool takes .* on cpu: \d,\d+ tokens at most$"),
        ({"max_model_len": 300}, r"^max_model_len: 300 is more than the model's context window of 256"),
        (
            {"kv_tokens": 64, "max_model_len": 200},
            r"^max_model_len: 200 tokens .* pool of 64; lower it to 64",
        ),
    ],
    ids=str,
)
async def test_lengths_that_cannot_be_met_are_refused_before_weights_are_read(
    checkpoint, monkeypatch, settings, message
):
    set_memory(monkeypatch, 4 * 10**6)
    monkeypatch.setattr("models.checkpoint.read_tensors", None)
    with pytest.raises(ValueError, match=message):
        await startup.load(config(checkpoint, **settings), print)


def test_a_gpu_refuses_before_loading_only_what_cannot_fit_without_a_step(checkpoint, monkeypatch):
    monkeypatch.setattr("engine.device.fit.choose_device", lambda config: torch.device("cuda", 0))
    monkeypatch.setattr("engine.device.fit.step_bytes", lambda model, token_budget: 190_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights + room, GIB))
    files, settings = find(str(checkpoint), None), EngineConfig(max_model_len=200)
    weights, room = num_bytes(outline(files, torch.bfloat16).model), 200_000
    check_lengths(settings, files, 512)  # 200 tokens take 64 kB
    room = 50_000
    with pytest.raises(ValueError, match="no memory is left"):
        check_lengths(settings, files, 512)


def test_a_checkpoint_that_lacks_a_tensor(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        check_model(config(checkpoint))


def test_a_model_that_was_not_fetched(tmp_path):
    for name in ("SmolLM2-135M-Instruct", "someone/absent"):
        with pytest.raises(ModelError, match=f"not on this machine; `monoloop pull {name}` fetches it"):
            check_model(EngineConfig(model=name, cache_dir=tmp_path))
        with pytest.raises(ModelError, match="cannot be fetched into /proc"):
            check_model(EngineConfig(model=name, cache_dir="/proc"))
        with pytest.raises(ValueError, match=r"chat_template: .*none cannot be read"):
            check_model(EngineConfig(model=name, cache_dir=tmp_path, chat_template=tmp_path / "none"))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_outline_has_the_tensors_of_the_model(name, tmp_path):
    """Without values, and so without reading them."""
    make(name).save_pretrained(tmp_path)
    model, architecture, quantization = outline(files_of(tmp_path), torch.float32)
    loaded = load(files_of(tmp_path), torch.float32, torch.device("cpu"))
    assert architecture == FAMILIES[name].architecture
    assert quantization == ("mxfp4" if "MXFP4" in name else None)
    assert model.parameters().keys() == loaded.parameters().keys()
    assert num_parameters(model) == num_parameters(loaded)
    least = 4 if quantization is None else 0.5  # MXFP4 has two parameters in a byte
    assert num_bytes(model) >= least * num_parameters(model)
