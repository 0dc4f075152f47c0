"""Names of the parts of a GGUF model that was written as several files: NAME-00001-of-00003.gguf."""

import re
from pathlib import Path

from models.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_NAMES_SHOWN = 5


def model_name(path: Path) -> str:
    """Return the name of a .gguf file without its suffix and the number of the part."""
    part = _PART.fullmatch(path.stem)
    return part["name"] if part else path.stem


def part_paths(path: Path) -> list[Path]:
    """Return all parts of the model that a file is a part of, in order; one file, unless its name says so.

    Raises ModelError naming the parts that are missing.
    """
    part = _PART.fullmatch(path.stem)
    if part is None:
        return [path]
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count:
        raise ModelError(f"{path} is named as part {int(part['number'])} of {count}, which there cannot be")
    paths = [
        path.with_name(f"{part['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]
    if missing := [found.name for found in paths if not found.is_file()]:
        more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
        raise ModelError(
            f"{path} is one of {count} parts; {path.parent} lacks {', '.join(missing[:_NAMES_SHOWN])}{more}"
        )
    return paths


def first_parts(folder: Path) -> list[Path]:
    """Return the file of each GGUF model in a folder, by name; of a model in parts the first one there."""
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        models.setdefault(model_name(path), path)
    return list(models.values())
