"""The models in the cache folders of this machine: lists them, and removes one."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models.catalog import cache_folder, catalog_source, is_hub_id
from models.errors import ModelError
from models.gguf.choices import choices


@dataclass(frozen=True)
class CachedModel:
    """A fetched model: its name as `--model` takes it, the folder with all its files, their size."""

    name: str
    folder: Path
    size_bytes: int


def cached_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """Return the models of the catalog and of the hub that were fetched, by name.

    Without `cache_dir` those of the hub are in the hub's own cache, which other programs use, too.
    """
    return sorted((*_from_wheels(cache_dir), *_from_hub(cache_dir)), key=lambda model: model.name.lower())


def is_fetched(name: str, cache_dir: Path | None = None) -> bool:
    """Return False for a model of the catalog or of the hub that is not in the cache.

    Of a hub repository with several GGUF models the one that is named must be there.
    """
    source = catalog_source(name)
    if source is None and (Path(name).expanduser().exists() or not is_hub_id(name)):
        return True
    repository, _, choice = (source or name).partition(":")
    model = _find(repository, cache_dir)
    return model is not None and (not choice or _gguf_files(model, choice) is not None)


def fetch_folder(name: str, cache_dir: Path | None = None) -> Path:
    """Return the folder that a model of the catalog or of the hub is fetched into."""
    if cache_dir is None and catalog_source(name) != name:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE)
    return cache_folder(cache_dir)


def remove(name: str, cache_dir: Path | None = None) -> CachedModel | None:
    """Delete a model's files from the cache and return what it was; None if it is not there.

    OWNER/NAME:CHOICE is one GGUF model of a hub repository; the rest of the repository stays.
    """
    repository, _, choice = (catalog_source(name) or name).partition(":")
    model = _find(repository, cache_dir)
    if model is None:
        return None
    if not choice:
        shutil.rmtree(model.folder)
        return model
    if (links := _gguf_files(model, choice)) is None:
        return None
    # The hub's cache has the contents in `blobs`, and links to them from each revision that was fetched.
    files = {file for link in links if (file := link.resolve()).is_relative_to(model.folder.resolve())}
    size_bytes = sum(file.stat().st_size for file in files if file.exists())
    for path in (*links, *files):
        path.unlink(missing_ok=True)
    return CachedModel(f"{repository}:{choice}", model.folder, size_bytes)


def _find(name: str, cache_dir: Path | None) -> CachedModel | None:
    """Return the cached model of a name without a choice; None if there is none."""
    return next((model for model in cached_models(cache_dir) if model.name == name), None)


def _gguf_files(model: CachedModel, choice: str) -> list[Path] | None:
    """Return the files of one GGUF model of a hub repository, in all its revisions; None without any."""
    for name, files in choices(map(str, model.folder.rglob("*.gguf"))).items():
        if name.lower() == choice.lower():
            return list(map(Path, files))
    return None


def _from_wheels(cache_dir: Path | None) -> Iterator[CachedModel]:
    try:
        cache = cache_folder(cache_dir)
    except ModelError:  # without a home there is no cache
        return
    for folder in cache.iterdir() if cache.is_dir() else ():
        if catalog_source(folder.name) == folder.name:
            files = [path for path in folder.rglob("*") if path.is_file()]
            yield CachedModel(folder.name, folder, sum(path.stat().st_size for path in files))


def _from_hub(cache_dir: Path | None) -> Iterator[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache_folder(cache_dir) / "hub" if cache_dir else None).repos
    except (CacheNotFound, RuntimeError):  # RuntimeError: there is no home
        return
    for repository in repositories:
        if repository.repo_type == "model":
            yield CachedModel(repository.repo_id, repository.repo_path, repository.size_on_disk)
