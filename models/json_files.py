"""Reads the JSON files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

from models.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError, naming the file."""
    found = _read_json(path)
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object")
    return found


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects. Raises ModelError, naming the file."""
    found = _read_json(path)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ModelError(f"{path} is not a JSON list of objects")
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
