"""Fetching from a hub that is a dictionary of files: which of them, and what is refused before.

Covers models/gguf/choices.py.
"""

import errno
import json
import os
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects

from models.errors import FetchFailed, ModelError
from models.gguf.choices import choices
from models.hub import fetch_from_hub
from models.shapes import CONFIGS


def test_hub_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FetchFailed, match="someone/some-model is not in the cache and the hub cannot be reached"
    ):
        fetch_from_hub("someone/some-model", tmp_path, progress=False)


def test_a_full_disk(tmp_path, monkeypatch):
    def snapshot_download(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(FetchFailed, match=r"could not be fetched from the hub: .*No space left on device"):
        fetch_from_hub("owner/name", tmp_path, progress=False)


SHARDED = "model.safetensors.index.json"
INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}})
SHARDS = {"model-1-of-2.safetensors": "", "model-2-of-2.safetensors": ""}
SMALL = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], **CONFIGS["tiny"]}),
    "tokenizer.json": "{}",
    "1_Pooling/config.json": "{}",
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that fetches a repository with these files, and returns the names of the weights fetched."""
    files, fetched = {}, set()

    def snapshot_download(repository, *, allow_patterns, ignore_patterns, dry_run, **_):
        assert repository == "owner/name"
        names = list(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        if dry_run:
            return [SimpleNamespace(filename=name) for name in names]
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(files[name])
            fetched.add(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    def fetch(given, model="owner/name", expected=""):
        files.update(given)
        try:
            assert fetch_from_hub(model, None, progress=False) == tmp_path / expected
        finally:
            assert {name for name in given if name.endswith(".json")} <= fetched
        return sorted(name for name in fetched if not name.endswith(".json"))

    return fetch


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (
            ["model.safetensors", "consolidated.safetensors", "fp16/model.safetensors", "a.bin"],
            ["model.safetensors"],
        ),
        ([*SHARDS, SHARDED, "consolidated.safetensors", "model.fp16.safetensors"], [*SHARDS]),
        ([*SHARDS, SHARDED, "model.safetensors"], [*SHARDS]),
        (["model.safetensors", SHARDED], ["model.safetensors"]),
        (["weights.safetensors"], ["weights.safetensors"]),
    ],
)
def test_one_copy_of_the_weights_is_fetched(hub, weights, expected):
    assert hub({**SMALL, **{name: INDEX if name == SHARDED else "" for name in weights}}) == expected


@pytest.mark.parametrize(
    "name", ["original/model.safetensors", "consolidated.safetensors", "adapter_model.safetensors", "a.bin"]
)
def test_a_repository_without_weights_that_load(hub, tmp_path, name):
    with pytest.raises(ModelError, match=r"owner/name has no weights as safetensors .* are not fetched"):
        hub({**SMALL, name: ""})
    assert not (tmp_path / name).exists()


GGUFS = dict.fromkeys(
    ["m-Q4_K_M.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"], ""
)


@pytest.mark.parametrize("config", [{}, SMALL], ids=["alone", "with a config"])
def test_a_repository_of_one_gguf_model(hub, config):
    """The projector of images beside it is no model."""
    weights = {"m-Q4_K_M.gguf": "", "mmproj-F16.gguf": ""}
    assert hub(config | weights, expected="m-Q4_K_M.gguf") == ["m-Q4_K_M.gguf"]


def test_one_of_several_gguf_models_is_fetched_by_name(hub):
    parts = sorted(name for name in GGUFS if "Q8_0" in name)
    assert hub(GGUFS, "owner/name:q8_0", parts[0]) == parts


def test_several_gguf_models_are_named(hub, tmp_path):
    with pytest.raises(
        ModelError, match="has several GGUF models, name one: owner/name:Q8_0, owner/name:Q4_K_M"
    ):
        hub(GGUFS)
    with pytest.raises(ModelError, match="owner/name has no GGUF model Q2_K; it has: owner/name:Q8_0, owner"):
        hub(GGUFS, "owner/name:Q2_K")
    assert not [*tmp_path.rglob("*.gguf")]


def test_names_of_quantizations():
    names = ["a-UD-Q4_K_XL", "a.Q4_K_XL", "b_iq4_xs", "a-BF16", "a-BF16-v2", "b-bf16", "whole"]
    found = choices(f"{name}.gguf" for name in names)
    assert sorted(found) == sorted(
        ["UD-Q4_K_XL", "Q4_K_XL", "IQ4_XS", "a-BF16", "a-BF16-v2", "b-bf16", "whole"]
    )


def test_weights_of_an_unsupported_architecture_are_not_fetched(hub, tmp_path):
    with pytest.raises(ModelError, match="architecture GPT2LMHeadModel is not supported"):
        hub({"config.json": '{"architectures": ["GPT2LMHeadModel"]}', "model.safetensors": ""})
    assert not (tmp_path / "model.safetensors").exists()
