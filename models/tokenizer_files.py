"""Tokenizer files: converted once from a .gguf, or read for single values without loading them."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from models.checkpoint import read_json
from models.errors import ModelError

_CONVERSION = "tokenizer-1"
"""Folder name of converted tokenizers; the number increases when the conversion changes."""

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Values of `tokenizer.ggml.pre` whose vocabularies split off every digit first."""


def convert_tokenizer(gguf: Path, pre: str, folder: Path) -> Path:
    """Return the folder below `folder` that holds the tokenizer of a .gguf file, converting it if need be.

    `pre` is the file's `tokenizer.ggml.pre`. Takes seconds the first time. Raises ModelError.
    """
    target = folder / _CONVERSION
    if target.is_dir():
        return target
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # any error of a library that does not understand the file
        raise ModelError(f"the tokenizer in {gguf} cannot be converted: {error}") from error
    if pre in _DIGITS_APART:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        # transformers reads only some pre-tokenizers; this one it would leave at GPT-2's, which sees "  1" as
        # " " + " 1" where the model was trained on "  " + "1".
        split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        tokenizer.backend_tokenizer.pre_tokenizer = split
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
