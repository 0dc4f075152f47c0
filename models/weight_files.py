"""Finds the files of weights in a checkpoint folder, and says what to do about folders of other formats."""

import os
from pathlib import Path, PurePosixPath

from models.errors import ModelError
from models.json_files import read_json
from models.safetensors_file import PICKLE

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ADAPTER_CONFIG = "adapter_config.json"
_MISTRAL = "consolidated"
OTHER_NAMES = ("adapter_model", _MISTRAL)
"""Beginnings of names of .safetensors files whose tensors have other names than in transformers."""


def weight_files(folder: Path) -> list[Path]:
    """Return the .safetensors files of a folder in name order. Raises ModelError if there are none."""
    if (index := read_index(folder)) is not None:
        files = sorted({folder / name for name in index.values()})
    elif (folder / WHOLE_FILE).is_file():
        files = [folder / WHOLE_FILE]
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith(OTHER_NAMES))
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names")
    if not files:
        raise ModelError(f"{folder} holds no .safetensors file{what_it_holds(folder)}")
    return files


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file of each tensor as the index of a folder says, None without one.

    An index is ignored if it names missing files beside the whole file: it is left from the shards that were
    joined. Raises ModelError for names outside of the folder.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict):
        raise ModelError(f"{path} has no weight_map")
    names = set()
    for name in index.values():
        if not isinstance(name, str) or not _stays_inside(folder, name):
            raise ModelError(f"{path} points outside its folder: {name!r:.99}")
        names.add(name)
    if (folder / WHOLE_FILE).is_file() and not all((folder / name).is_file() for name in names):
        return None
    return index


def _stays_inside(folder: Path, name: str) -> bool:
    """Check a name, and where a link of that name leads: in a cache of the hub, to its folder `blobs`."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or path.is_absolute() or ".." in path.parts or ":" in name or not name.isprintable():
        return False
    root = Path(os.path.realpath(folder))
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(Path(os.path.realpath(root.parent.parent / "blobs")))
    target = Path(os.path.realpath(folder / name))
    return any(target.is_relative_to(allowed) for allowed in roots)


def what_it_holds(folder: Path) -> str:
    """Return what a folder that cannot be served holds instead and what to do, as the end of a sentence."""

    def names(*patterns: str) -> list[str]:
        return sorted(file.name for pattern in patterns for file in folder.glob(pattern))

    if (folder / _ADAPTER_CONFIG).is_file():
        return (
            "; it is an adapter, without the weights of the model it was trained on: merge it into that "
            "model (PEFT: merge_and_unload, then save_pretrained)"
        )
    if found := sorted(file.parent.name for file in folder.glob("*/config.json")):
        return f"; it is a folder of models: name one of {', '.join(found[:5])}"
    if found := names("*.gguf"):
        return f"; to serve the GGUF file in it, name the file: {found[0]}"
    if found := names(f"{_MISTRAL}*.safetensors"):
        return f"; {found[0]} is in Mistral's own format: take the model in that of transformers"
    if found := names(*_PICKLES):
        return f"; {found[0]} is {PICKLE}"
    for kind, *patterns in (
        ("ONNX", "*.onnx", "onnx"),
        ("MLX", "*.npz"),
        ("TensorFlow", "*.h5"),
        ("Flax", "*.msgpack"),
    ):
        if names(*patterns):
            return f"; it is in the format of {kind}: take the model as safetensors"
    return "" if any(folder.iterdir()) else "; it is empty"
