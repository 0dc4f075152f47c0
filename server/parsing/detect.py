"""Chooses the formats in which the served model writes: by the settings, or by its chat template."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine import TokenizerPool
from server.flags import SettingsError
from server.parsing.formats import reasoning_formats, tool_formats, whole_formats
from server.parsing.formats.response_template import CALLS, REASONING, RESPONSE_TEMPLATE
from server.parsing.tools_in_prompt import can_ask_for

if TYPE_CHECKING:
    ToolSetting = str
    ReasoningSetting = str
else:
    ToolSetting = Literal["auto", "none", *sorted(tool_formats()), RESPONSE_TEMPLATE]
    ReasoningSetting = Literal[
        "auto", "none", *sorted((*reasoning_formats(), *whole_formats())), RESPONSE_TEMPLATE
    ]

# Templates to remember. Each request asks about the served model's: to search 11,000 characters took 0.15 ms.
MAX_TEMPLATES = 8


class Formats(NamedTuple):
    """Names of the formats, None where nothing is parsed; `tokens` are ids of added tokens by their text."""

    tools: str | None
    reasoning: str | None
    tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: TokenizerPool, tools: ToolSetting, reasoning: ReasoningSetting) -> "Formats":
        """Return the formats that tool_parser and reasoning_parser mean for a model. Raises SettingsError."""
        own = tokenizer.response_template
        for name, setting in (("tool_parser", tools), ("reasoning_parser", reasoning)):
            if setting == RESPONSE_TEMPLATE and own is None:
                raise SettingsError(f"{name}: this model's tokenizer has no response template")
        fields = frozenset(own["fields"]) if own is not None else frozenset()
        return cls(
            _chosen(tools, tool_format(tokenizer.tool_template or "", CALLS in fields)),
            _chosen(reasoning, reasoning_format(tokenizer.chat_template or "", bool(fields & REASONING))),
            tokenizer.added_tokens,
        )


NO_FORMATS = Formats(None, None, {})


def _chosen(setting: str, detected: str | None) -> str | None:
    """Return the format of a setting."""
    return {"auto": detected, "none": None}.get(setting, setting)


@lru_cache(maxsize=MAX_TEMPLATES)
def has_place_for_tools(template: str) -> bool:
    """Return True if a chat template renders tools; for others see tools_in_prompt.py."""
    return re.search(r"\btools\b", template) is not None


def tool_format(template: str, has_own: bool) -> str | None:
    """Return the format of calls that a template shows; `has_own`: a response template parses calls.

    If it has no place for tools, calls are asked for in a message: in that format or, if none is shown, or
    one that only templates write, in Hermes'.
    """
    shown = [parser for parser in tool_formats().values() if parser.is_shown_by(template)]
    if not has_place_for_tools(template):
        return next((parser.name for parser in shown if can_ask_for(parser)), "hermes")
    return shown[0].name if shown else RESPONSE_TEMPLATE if has_own else None


def reasoning_format(template: str, has_own: bool) -> str | None:
    """Return the format of reasoning that a template shows; `has_own`: a response template parses it."""
    formats = {**whole_formats(), **reasoning_formats()}
    shown = (name for name, parser in formats.items() if parser.is_shown_by(template))
    return next(shown, RESPONSE_TEMPLATE if has_own else None)
