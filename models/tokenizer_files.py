"""Tokenizer files: converted once from a .gguf, or read for single values without loading them."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import ModelError
from models.json_files import read_json

_CONVERSION = "tokenizer-3"
"""Folder name of converted tokenizers; the number increases when the conversion changes."""


def convert_tokenizer(gguf: Path, metadata: Mapping[str, Any], folder: Path) -> Path:
    """Return the folder below `folder` with the tokenizer of a .gguf file, converting it if need be.

    Raises ModelError for a tokenizer that is not supported.
    """
    target = folder / _CONVERSION
    if target.is_dir():
        return target
    from models.gguf.tokenizer import build_tokenizer  # transformers takes seconds to import

    try:
        tokenizer = build_tokenizer(dict(metadata))
    except ModelError as error:
        raise ModelError(f"{gguf}: {error}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder))
        try:
            tokenizer.save_pretrained(scratch)
            os.rename(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():  # else another process was there first, with the same result
            raise ModelError(f"cannot write to the cache folder {folder}: {error}") from error
    return target


def token_ids(folder: Path, role: str) -> list[int]:
    """Return the ids of a special token such as `eos_token` in a tokenizer's files.

    tokenizer_config.json and special_tokens_map.json may name different ones. Raises ModelError for files
    that cannot be read.
    """
    config, special = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    known = _added_ids(config.get("added_tokens_decoder"))
    ids = []
    for content in dict.fromkeys(_content(source.get(role)) for source in (config, special)):
        if content is not None:
            token_id = known.get(content)
            ids.append(_vocabulary_id(folder / "tokenizer.json", content) if token_id is None else token_id)
    return [token_id for token_id in ids if token_id is not None]


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _added_ids(added: Any) -> dict[str, int]:
    """Return text and id of the tokens in an `added_tokens_decoder`."""
    entries = added.items() if isinstance(added, dict) else ()
    return {
        content: int(number)
        for number, token in entries
        if number.isdecimal() and (content := _content(token)) is not None
    }


def _vocabulary_id(tokenizer_file: Path, content: str) -> int | None:
    if not tokenizer_file.is_file():
        return None
    tokenizer = read_json(tokenizer_file)
    try:
        for added in tokenizer.get("added_tokens") or ():
            if added["content"] == content:
                return int(added["id"])
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # of Unigram: pairs of text and score
            vocabulary = {piece: number for number, (piece, *_) in enumerate(vocabulary)}
        found = vocabulary.get(content)
        return None if found is None else int(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{tokenizer_file} makes no sense: {error!r}") from error
