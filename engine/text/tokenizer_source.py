"""Reads a tokenizer's files: with the tokenizers library alone where that is enough, else with transformers.

transformers takes 0.7 s and 45 MB to import and read a tokenizer. It is needed for the many ways in which
checkpoints describe theirs; a tokenizer converted from a .gguf is a tokenizer.json and a few names.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.text.chat_template import SPECIAL_TOKENS
from models.json_files import read_json

# Keys of a tokenizer_config.json that say nothing beside the texts of special tokens.
_PLAIN_KEYS = {
    "backend",
    "tokenizer_class",
    "model_max_length",
    "clean_up_tokenization_spaces",
} | SPECIAL_TOKENS


@dataclass(frozen=True)
class TokenizerSource:
    """What a tokenizer's files hold: the `tokenizers.Tokenizer`, special tokens by role, and chat templates.

    `chat_template` is one template or several by name. `hf` is transformers' tokenizer if it was needed.
    """

    backend: Any
    special_tokens: dict[str, str]
    chat_template: str | dict[str, str] | None
    hf: Any = None


def read_source(folder: Path) -> TokenizerSource:
    """Read the tokenizer of a folder. Raises ModelError."""
    config = _plain_config(folder)
    try:
        return _with_transformers(folder) if config is None else _plain(folder, config)
    except ModelError:
        raise
    except Exception as error:  # of several libraries, for files that they do not understand
        raise ModelError(f"No usable tokenizer in {folder}: {_in_one_line(error)}") from error


def _plain_config(folder: Path) -> dict[str, Any] | None:
    """Return the tokenizer_config.json of a folder that needs no transformers, None for any other."""
    # transformers takes more than the tokenizer's own files into account where a config.json names a model.
    needed, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if (folder / "config.json").is_file() or not (needed.is_file() and config_file.is_file()):
        return None
    config = read_json(config_file)
    tokens = [config[role] for role in SPECIAL_TOKENS & config.keys()]
    is_plain = config.get("tokenizer_class") == "TokenizersBackend" and config.keys() <= _PLAIN_KEYS
    return config if is_plain and all(isinstance(token, str | None) for token in tokens) else None


def _plain(folder: Path, config: dict[str, Any]) -> TokenizerSource:
    from tokenizers import Tokenizer

    templates = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    texts = {name: path.read_text(encoding="utf-8") for name, path in templates.items()}
    return TokenizerSource(
        backend=Tokenizer.from_file(str(folder / "tokenizer.json")),
        special_tokens={role: config[role] for role in SPECIAL_TOKENS if config.get(role) is not None},
        chat_template=texts.get("default") if texts.keys() <= {"default"} else texts,
    )


def _with_transformers(folder: Path) -> TokenizerSource:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    # It reads config.json, too, and has long warnings about RoPE, which the loader checks itself.
    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except StrictDataclassError as error:
        raise ModelError(
            f"{folder / 'config.json'} is refused by transformers, which reads it for the tokenizer: "
            f"{_in_one_line(error)}"
        ) from error
    return TokenizerSource(hf.backend_tokenizer, hf.special_tokens_map, hf.chat_template, hf)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
