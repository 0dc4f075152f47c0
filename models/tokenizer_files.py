"""Tokenizer files: converted once from a .gguf, or read for single values without loading them."""

import json
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


def token_id(folder: Path, role: str) -> int | None:
    """Return the id of a special token such as `eos_token` from a tokenizer's files; None if it has none."""
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    token = config.get(role)
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    for number, added in config.get("added_tokens_decoder", {}).items():
        if added.get("content") == content:
            return int(number)
    return _vocabulary_id(folder / "tokenizer.json", content)


def _vocabulary_id(tokenizer_file: Path, content: str) -> int | None:
    if not tokenizer_file.is_file():
        return None
    try:
        tokenizer: dict[str, Any] = json.loads(tokenizer_file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{tokenizer_file} cannot be read: {error}") from error
    for added in tokenizer.get("added_tokens", []):
        if added.get("content") == content:
            return int(added["id"])
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    found = vocabulary.get(content) if isinstance(vocabulary, dict) else None
    return int(found) if found is not None else None
