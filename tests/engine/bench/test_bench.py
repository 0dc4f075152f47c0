"""The device benchmarks run at tiny shapes, and their figures are plausible.

Covers engine/bench/attention_cases.py, engine/bench/ops.py, engine/bench/probe.py and engine/bench/steps.py.
"""

import pytest

from engine import bench
from engine.bench.steps import measure_floors
from engine.config import EngineConfig
from engine.request import SamplingParams
from models.formats.int8 import Int8Weights

CPU = EngineConfig(device="cpu", dtype="float32")
GREEDY = SamplingParams(max_tokens=10**9, temperature=0.0, ignore_eos=True)


def test_every_op_is_measured():
    seen = []
    ceilings, rows = bench.measure_ops(CPU, bench.OP_NAMES, seen.append)
    assert rows == seen
    assert {row.op for row in rows} == set(bench.OP_NAMES)
    assert ceilings.bytes_per_second > 0 and ceilings.flops_per_second > 0
    assert all(row.microseconds > 0 and row.gb_per_second > 0 for row in rows)


def test_one_op_alone():
    _, rows = bench.measure_ops(CPU, ["rms_norm"], lambda row: None)
    assert {row.op for row in rows} == {"rms_norm"}


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_of_a_tiny_model(page_size):
    config = CPU.model_copy(update={"page_size": page_size})
    steps = bench.StepsToMeasure(batches=(1, 3), context=20, prefills=(3, 33))
    seen = []
    _, rows = bench.measure_steps("tiny", config, steps, GREEDY, seen.append)
    assert rows == seen
    assert [(row.step, row.num_tokens) for row in rows] == [
        ("prefill", 3),
        ("prefill", 33),
        ("decode", 1),
        ("decode", 3),
    ]
    for row in rows:
        assert 0 < row.matmul_milliseconds < row.floor_milliseconds
        assert 0 < row.device_milliseconds <= row.milliseconds


def test_the_products_of_a_floor_are_those_of_the_weight_format(monkeypatch):
    called = []

    def matmul(self, x):
        called.append(self.out_features)
        return product(self, x)

    product = Int8Weights.matmul
    monkeypatch.setattr(Int8Weights, "matmul", matmul)
    config = CPU.model_copy(update={"quantization": "int8"})
    floors = measure_floors("tiny", config, bench.StepsToMeasure(batches=(2,), context=20, prefills=()))
    assert floors.matmul_seconds.keys() == {(2, 2)}
    assert called[:8] == [128, 64, 256, 64] * 2, "qkv, output, gate and up, and down of both layers"


def test_too_long_steps_are_refused():
    with pytest.raises(ValueError, match=r"prefill: 2049 tokens .* tiny has a context window of 512"):
        bench.measure_steps("tiny", CPU, bench.StepsToMeasure(), GREEDY, lambda row: None)
    steps = bench.StepsToMeasure(batches=(1,), context=20, prefills=(33,))
    config = CPU.model_copy(update={"kv_tokens": 16})
    with pytest.raises(ValueError, match="kv_tokens: 16 are too few, the steps of this run need 160"):
        bench.measure_steps("tiny", config, steps, GREEDY, lambda row: None)
