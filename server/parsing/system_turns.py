"""Moves system messages to where a chat template renders them."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

SYSTEM_ROLES = ("system", "developer")


def merge_system_turns(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation for a template that renders one system message, as the first.

    The system messages at the beginning become one. A later one is added to the text of the user's or tool's
    message before it; after a message of the assistant it becomes a message of the user, which those that
    follow are added to.
    """
    leading = list(takewhile(is_system, turns))
    merged: list[dict[str, Any]] = []
    if leading:
        merged.append(leading[0] | {"content": join(*(turn["content"] for turn in leading))})
    is_moved = False  # the last turn of `merged` is a system message that became a user's
    for turn in turns[len(leading) :]:
        if is_system(turn) and merged and merged[-1]["role"] in ("user", "tool"):
            merged[-1] = merged[-1] | {"content": join(merged[-1]["content"], turn["content"])}
        elif is_system(turn):
            merged.append({"role": "user", "content": turn["content"]})
            is_moved = True
        elif is_moved and turn["role"] == "user":
            merged[-1] = turn | {"content": join(merged[-1]["content"], turn["content"])}
            is_moved = False
        else:
            merged.append(turn)
            is_moved = False
    return merged


def is_system(turn: dict[str, Any]) -> bool:
    """Check that a message instructs the model."""
    return turn["role"] in SYSTEM_ROLES


def join(*texts: str) -> str:
    """Return the texts that are not empty, one paragraph each."""
    return "\n\n".join(filter(None, texts))
