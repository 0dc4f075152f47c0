"""`monoloop models`.

Covers server/commands/models.py.
"""

import json
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine.config import EngineConfig
from engine.errors import ModelError
from models.formats import CONVERSIONS
from server import cli


def test_architectures_and_weight_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [mistral] = [line.split() for line in lines if line.startswith("MistralForCausalLM")]
    assert mistral[1:] == ["llama", "yes", "attention:", "window", "4096"]
    assert any(line.startswith("weights in GGUF files: F32, F16, BF16") for line in lines)
    assert f"conversions (--quantization): {', '.join(CONVERSIONS)}" in lines


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    [qwen] = [entry for entry in listed["architectures"] if entry["name"] == "Qwen2ForCausalLM"]
    assert qwen == {
        "name": "Qwen2ForCausalLM",
        "features": {"attention": ["qkv bias"]},
        "has_scores": True,
        "gguf_names": ["qwen2"],
    }
    assert "int8" in listed["conversions"]


class FakeTokenizer:
    """A tokenizer whose templates show Hermes' tool calls and reasoning."""

    chat_template = "{{ messages }}<think>"
    tool_template = "{{ tools }}<tool_call>"
    response_template = None
    added_tokens: ClassVar[dict[str, int]] = {}


def found(**changes: Any) -> Any:
    """Return the check of a model of 8 billion parameters."""
    return SimpleNamespace(
        **{
            "name": "big",
            "path": "/models/big",
            "architecture": "Qwen3ForCausalLM",
            "features": {"attention": ("qk norm rms",)},
            "description": "attention: qk norm rms",
            "num_parameters": 8_000_000_000,
            "dtype": "bfloat16",
            "device": "cuda:0",
            "quantization": None,
            "weight_bytes": 16_000_000_000,
            "kv_dtype": "auto",
            "kv_token_bytes": 147_456,
            "kv_tokens": 400_000,
            "context_window": 40_960,
            "max_model_len": 40_960,
            "tokenizer": FakeTokenizer(),
        }
        | changes
    )


def test_a_model_that_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are those of serve, by flags and by environment."""
    asked: list[EngineConfig] = []
    monkeypatch.setattr("engine.check_model", lambda config: asked.append(config) or found())
    monkeypatch.setenv("MONOLOOP_PAGE_SIZE", "32")
    assert cli.main(["models", "big", "--dtype", "bfloat16"]) == 0
    [config] = asked
    assert (config.model, config.dtype, config.page_size) == ("big", "bfloat16", 32)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["parameters", "8,000,000,000"] in lines
    assert ["weights", "16.00 GB, bfloat16"] in lines
    assert ["reasoning", "think"] in lines
    assert ["features", "attention: qk norm rms"] in lines


def test_a_model_that_runs_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("engine.check_model", lambda config: found())
    assert cli.main(["models", "big", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["runs"] is True
    assert (shown["kv_tokens"], shown["chat_template"], shown["tool_format"]) == (400_000, True, "hermes")


def test_a_model_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EngineConfig) -> None:
        raise ModelError("it lacks its last layer")

    monkeypatch.setattr("engine.check_model", fail)
    assert cli.main(["models", "big"]) == 1
    assert "error: big does not run: it lacks its last layer" in capsys.readouterr().err
    assert cli.main(["models", "it"]) == 1
    assert capsys.readouterr().err == "monoloop: error: it lacks its last layer\n"
    assert cli.main(["models", "big", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "model": "big",
        "runs": False,
        "reason": "it lacks its last layer",
    }
