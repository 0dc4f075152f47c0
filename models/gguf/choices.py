"""The GGUF models of a hub repository, by their quantization: OWNER/NAME:Q4_K_M names one."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from models.errors import ModelError
from models.gguf.parts import model_name

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*))$", re.IGNORECASE
)
_NO_MODELS = ("mmproj", "imatrix")


def choices(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model, its parts in order, by its quantization.

    By the model's name where that has no quantization, or shares it with another.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not Path(file).name.lower().startswith(_NO_MODELS):
            models.setdefault(model_name(Path(file)), []).append(file)
    counts = Counter(map(_quantization, models))
    return {
        name if counts[_quantization(name)] > 1 else _quantization(name): parts
        for name, parts in models.items()
    }


def choose(repository: str, files: Iterable[str], choice: str | None) -> list[str]:
    """Return the files of one GGUF model of a repository; none if it has no such model at all.

    Raises ModelError with the choices if there are several, or not the one that is asked for.
    """
    found = choices(files)
    if choice is None and len(found) <= 1:
        return next(iter(found.values()), [])
    for name, parts in found.items():
        if choice is not None and name.lower() == choice.lower():
            return parts
    named = ", ".join(f"{repository}:{name}" for name in found) or "none"
    what = "several GGUF models, name one" if choice is None else f"no GGUF model {choice}; it has"
    raise ModelError(f"{repository} has {what}: {named}")


def _quantization(name: str) -> str:
    match = _QUANTIZATION.search(name)
    return match[1].upper() if match else name
