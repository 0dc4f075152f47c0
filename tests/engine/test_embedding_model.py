"""A folder such as Qwen3-Embedding's: tensors without a prefix, last-token pooling in its own file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import Engine
from engine.config import EngineConfig
from engine.readouts import PooledHidden
from engine.request import Request, SamplingParams
from tests.engine.toy import VOCAB_SIZE
from tests.tiny_checkpoint import write_model

TOKENS = (5, 9, 17, 3, 11)


def tiny_qwen3() -> Qwen3ForCausalLM:
    """Return a Qwen3 of two layers with random weights and a tied output."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def write_embedding_model(folder: Path, model: Qwen3ForCausalLM, mode: str) -> None:
    """Write a checkpoint as sentence-transformers stores it."""
    write_model(folder, model)
    weights = load_file(folder / "model.safetensors")
    bare = {
        name.removeprefix("model."): tensor for name, tensor in weights.items() if name != "lm_head.weight"
    }
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def settings(folder: Path, **changes: object) -> EngineConfig:
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_tokens": 256, **changes}
    return EngineConfig(**values)  # type: ignore[arg-type]


async def test_the_vector_is_that_of_the_last_token(tmp_path: Path) -> None:
    model = tiny_qwen3()
    write_embedding_model(tmp_path, model, "lasttoken")
    engine = await Engine.start(settings(tmp_path))
    try:
        assert (engine.model.pooling, engine.model.is_embedding_model) == ("last", True)
        readouts = (PooledHidden(engine.model.pooling),)
        [request] = await engine.prepare(
            [Request("a", TOKENS, SamplingParams(max_tokens=0), readouts=readouts)]
        )
        stream = engine.submit(request)
        await stream.collect()
        vector = torch.from_numpy(stream.readout(PooledHidden))
    finally:
        await engine.stop()
    with torch.inference_mode():
        expected = model.model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
    torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)


async def test_a_pooling_that_is_not_supported_is_named_unless_the_setting_says_another(
    tmp_path: Path,
) -> None:
    write_embedding_model(tmp_path, tiny_qwen3(), "cls_token")
    with pytest.raises(ValueError, match="pooling: the model's files ask for cls_token"):
        await Engine.start(settings(tmp_path))
    engine = await Engine.start(settings(tmp_path, pooling="mean"))
    await engine.stop()
    assert engine.model.pooling == "mean"
