"""Covers engine/device/formats.py; nothing here is timed."""

import logging
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.device import formats
from engine.device.formats import choose, layer_shapes, time_candidate, with_formats
from engine.startup import find
from kernels.expert_routing import RouterOptions
from models.shapes import SHAPES
from models.spec import MoeSpec
from tests.tiny_checkpoint import write_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TINY = SHAPES["tiny"]


@pytest.fixture
def compiles(monkeypatch):
    """A function that says if there are compiled kernels."""
    return lambda value: monkeypatch.setattr("kernels.cpu.compiler.is_available", lambda: value)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return find(str(write_checkpoint(tmp_path_factory.mktemp("model"))), None)


def chosen(files, device=CPU, **settings):
    config = with_formats(EngineConfig(**settings), files, device)
    assert with_formats(config, files, device) == config, "chosen once"
    return config.dtype, config.quantization, config.kv_dtype


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("float32", "int8", "int8")),
        ({"kv_dtype": "bfloat16"}, ("float32", "int8", "bfloat16")),
        ({"quantization": "int8"}, ("float32", "int8", "int8")),
        ({"quantization": "fp16"}, ("float32", "fp16", "bfloat16")),
        ({"quantization": "dense"}, ("auto", "dense", "auto")),
        ({"quantization": "int4"}, ("auto", "int4", "auto")),
        ({"dtype": "float32"}, ("float32", "auto", "auto")),
        ({"dtype": "bfloat16", "quantization": "int8"}, ("bfloat16", "int8", "auto")),
    ],
    ids=str,
)
def test_a_cpu_with_compiled_kernels(files, compiles, settings, expected):
    compiles(True)
    assert chosen(files, **settings) == expected


def test_keys_with_a_bias_stay_in_bfloat16(compiles):
    compiles(True)
    biased = TINY.with_attention(lambda _, attention: replace(attention, qkv_bias=True))
    config = formats.of_spec(EngineConfig(), biased, CPU)
    assert (config.quantization, config.kv_dtype) == ("int8", "bfloat16")


def test_a_gpu_has_the_formats_of_the_checkpoint(files, compiles):
    compiles(True)
    assert chosen(files, GPU) == ("auto", "auto", "auto")


def test_a_quantized_checkpoint_stays_as_it_is(files, compiles, monkeypatch):
    compiles(True)
    monkeypatch.setattr("models.loader.is_quantized", lambda files: True)
    assert chosen(files) == ("auto", "auto", "auto")


def test_int8_without_compiled_kernels_has_the_dtype_of_the_cpu(files, compiles):
    compiles(False)
    assert chosen(files, quantization="int8") == ("auto", "int8", "auto")


def test_the_log_says_what_was_chosen_and_why(files, compiles, caplog):
    compiles(True)
    with caplog.at_level(logging.INFO, "monoloop.engine"):
        with_formats(EngineConfig(), files, CPU)
    assert "quantization: int8, whose kernels are compiled for this CPU" in caplog.text


def test_a_cpu_without_vectors_of_integers_has_no_compiled_int8(files, compiles, monkeypatch):
    compiles(True)
    monkeypatch.setattr(formats, "num_lanes", lambda: 0)
    assert chosen(files, quantization="int8") == ("auto", "int8", "auto")
    name, why = choose(TINY, lambda call: 1.0)
    assert name in ("fp16", "dense")
    assert "neither AVX2 nor AVX512" in why


def test_a_model_with_experts_stays_dense(compiles):
    compiles(True)
    experts = MoeSpec(4, 32, RouterOptions(2), "silu")
    layers = tuple(replace(layer, mlp=experts) for layer in TINY.layers)
    name, why = choose(replace(TINY, layers=layers), lambda call: 1.0)
    assert name == "dense"
    assert "experts" in why


@pytest.mark.parametrize(
    ("times", "is_independent", "expected"),
    [
        ({"fp16": (1, 8), "dense": (3, 4)}, {"fp16", "dense"}, "fp16"),
        ({"fp16": (2, 8), "dense": (3, 4)}, {"fp16", "dense"}, "dense"),
        ({"fp16": (2, 8), "dense": (3, 4)}, {"fp16"}, "fp16"),
        ({"fp16": (1, 1), "dense": (3, 4)}, set(), "dense"),
        ({"dense": (3, 4)}, set(), "dense"),
    ],
)
def test_the_fastest_with_independent_rows(compiles, monkeypatch, times, is_independent, expected):
    compiles(False)

    def timed(name, shapes, timer):
        return formats.Timed(name, times[name], name in is_independent) if name in times else None

    monkeypatch.setattr(formats, "time_candidate", timed)
    name, why = choose(TINY, lambda call: 1.0)
    assert name == expected
    assert "since numba is not installed" in why


def test_candidates_are_timed_on_the_shapes_of_a_layer(compiles):
    compiles(False)
    shapes = layer_shapes(replace(TINY, layers=TINY.layers[:1]))
    assert len(shapes) == 4
    calls = []

    def timer(call):
        calls.append(call())
        return 0.5

    found = time_candidate("dense", shapes, timer)
    assert found.seconds == (2.0, 2.0)
    assert [len(result) for result in calls] == [1, 16] * 4
    if time_candidate("fp16", shapes, timer) is not None:
        assert time_candidate("fp16", shapes, timer).is_independent


def test_a_format_that_the_cpu_lacks_is_left_out(monkeypatch):
    monkeypatch.setattr("models.formats.fp16._engines", lambda: [])
    assert time_candidate("fp16", [], lambda call: 1.0) is None
