"""An engine that converts weights while loading: it answers, and its record replays in the same format."""

import re

import pytest

from engine import Engine
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.record.replay import replay
from engine.request import Request, SamplingParams
from models.formats import CONVERSIONS
from tests.tiny_checkpoint import write_checkpoint


def settings(folder, **more):
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", kv_tokens=128, max_num_seqs=4, threads=1, **more
    )


async def answer(config):
    engine = await Engine.start(config)
    try:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
        output = await engine.submit(Request("r", tuple(range(10, 40)), sampling)).collect()
        return engine.model, output.num_tokens
    finally:
        await engine.stop()


@pytest.mark.parametrize("name", ["fp8", "int8"])
async def test_an_engine_answers_in_eight_bits_and_its_record_replays(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    record = tmp_path / "record"
    model, num_tokens = await answer(settings(folder, quantization=name, record=record))
    plain_model, _ = await answer(settings(folder))
    assert (model.quantization, plain_model.quantization) == (name, None)
    assert model.dtype == plain_model.dtype == "float32"
    assert num_tokens == 20
    assert replay(record).first is None, "the record says how its weights were quantized"


async def test_an_unknown_quantization_names_the_known_ones(tmp_path):
    known = re.escape(f"quantization 'int3' is not known; known: auto, {', '.join(CONVERSIONS)}")
    with pytest.raises(ModelError, match=known):
        await Engine.start(settings(write_checkpoint(tmp_path), quantization="int3"))


def test_the_help_of_the_setting_names_every_conversion():
    """Except for dense, which changes nothing."""
    description = EngineConfig.model_fields["quantization"].description or ""
    assert not {name for name in CONVERSIONS if name != "dense" and f" {name} (" not in description}
