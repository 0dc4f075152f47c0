"""`monoloop models`.

Covers server/commands/models.py.
"""

import json

import pytest

from server import cli


def test_architectures_and_weight_formats_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [mistral] = [line.split() for line in lines if line.startswith("MistralForCausalLM")]
    assert mistral[1:] == ["llama", "yes", "attention:", "window", "4096"]
    assert any(line.startswith("weights in GGUF files: F32, F16, BF16") for line in lines)
    assert any(line.startswith("conversions (--quantization): dense, int8") for line in lines)


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
