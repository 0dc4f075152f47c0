"""Fetches a repository of the Hugging Face hub: configuration, tokenizer, and one copy of the weights."""

import glob
from pathlib import Path
from typing import Any

from models.checkpoint import CONFIG_FILE, read_config
from models.errors import FetchFailed, ModelError
from models.gguf.choices import choose
from models.weight_files import OTHER_NAMES, WHOLE_FILE, read_index

_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def fetch_from_hub(name: str, cache_dir: Path | None, *, progress: bool) -> Path:
    """Return the local snapshot of a hub repository: configuration, tokenizer and one copy of the weights.

    The configuration is checked before the weights are fetched. For a repository without weights as
    safetensors it is the path of its .gguf file, the first of a model in parts; `name` is OWNER/NAME, or
    OWNER/NAME:CHOICE for one of several GGUF models.

    Without `cache_dir` it lies in the hub's own cache, shared with other programs. Offline, one
    fetched before is used. Raises ModelError.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import tqdm

    repository, _, choice = name.partition(":")

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.pop("name", None)  # the hub's own bars have one
            super().__init__(*args, **{**kwargs, "disable": not progress})

    def snapshot(*patterns: str, dry_run: bool = False) -> Any:
        return snapshot_download(
            repository,
            cache_dir=cache_dir / "hub" if cache_dir else None,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*.safetensors", *(f"{name}*" for name in OTHER_NAMES)],
            tqdm_class=Bar,
            dry_run=dry_run,
        )

    def fetch(*patterns: str) -> Path:
        """Return the snapshot with the files that match; of safetensors only those that are in no folder."""
        return Path(snapshot(*patterns))

    def gguf_files(folder: Path) -> list[str]:
        """Return the .gguf files of the repository; offline, those in its snapshot."""
        try:
            return [file.filename for file in snapshot("*.gguf", dry_run=True)]
        except errors.DryRunError:
            return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]

    try:
        folder = fetch(*_FILES)
        if not choice and (folder / CONFIG_FILE).is_file():
            read_config(folder)
            # A repository may hold the weights several times: whole, in shards, in the author's own format.
            for patterns in (_indexed(folder), (WHOLE_FILE,), ("*.safetensors",)):
                if patterns:
                    folder = fetch(*patterns)
                    if any(folder.glob("*.safetensors")):
                        return folder
        if files := choose(repository, gguf_files(folder), choice or None):
            return fetch(*map(glob.escape, files)) / files[0]
        raise ModelError(
            f"{repository} has no weights as safetensors under the names of transformers, and no .gguf file; "
            "those in other formats, such as pickles (.bin, .pt), are not fetched"
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its licence on the hub, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no repository {repository}, or not for this user (`hf auth login`)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FetchFailed(
            f"{repository} is not in the cache and the hub cannot be reached. Check the network (and that "
            "HF_HUB_OFFLINE is not set), or name a folder or a .gguf file that is on this machine."
        ) from error
    except ImportError as error:
        raise FetchFailed(
            f"{repository} could not be fetched: the environment names a SOCKS proxy (ALL_PROXY), which "
            "needs the package socksio (pip install socksio)"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise FetchFailed(f"{repository} could not be fetched from the hub: {error}") from error


def _indexed(folder: Path) -> tuple[str, ...]:
    """Return the files that the index of a snapshot names, as patterns; none without an index."""
    names = {Path(name).name for name in (read_index(folder) or {}).values()}
    return tuple(glob.escape(name) for name in sorted(names))
