"""Which formats the served model writes in: by the settings, or by what its chat template shows."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from server.flags import SettingsError
from server.parsing.formats.response_template import REASONING
from server.parsing.registry import (
    RESPONSE_TEMPLATE,
    ReasoningFormat,
    ReasoningSetting,
    ToolFormat,
    ToolSetting,
    Whole,
)

# What a template contains that renders calls of a format; the first counts. GLM's <tool_call> holds no JSON.
TOOL_SIGNS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", None),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("<|python_start|>", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("<function_calls>", "pythonic"),
)
REASONING_SIGNS: tuple[tuple[str, ReasoningFormat], ...] = (
    ("[THINK]", "mistral"),
    ("<think>", "think"),
    ("</think>", "think"),
)


class TokenizerFacts(Protocol):
    """What the engine's TokenizerPool tells about the model's formats."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def added_tokens(self) -> Mapping[str, int]: ...

    @property
    def response_template(self) -> Mapping[str, Any] | None: ...


class Formats(NamedTuple):
    """The formats, None where nothing is parsed; `tokens` are the ids of the vocabulary's added tokens."""

    tools: ToolFormat | Whole | None
    reasoning: ReasoningFormat | Whole | None
    tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: TokenizerFacts, tools: ToolSetting, reasoning: ReasoningSetting) -> "Formats":
        """What the settings tool_parser and reasoning_parser mean for this model. Raises SettingsError."""
        template = tokenizer.chat_template or ""
        own = tokenizer.response_template
        for name, setting in (("tool_parser", tools), ("reasoning_parser", reasoning)):
            if setting == RESPONSE_TEMPLATE and own is None:
                raise SettingsError(f"{name}: this model's tokenizer has no response template")
        fields = frozenset(own["fields"]) if own is not None else frozenset()
        return cls(
            tool_format(template, "tool_calls" in fields)
            if tools == "auto"
            else (None if tools == "none" else tools),
            reasoning_format(template, bool(fields & REASONING))
            if reasoning == "auto"
            else (None if reasoning == "none" else reasoning),
            tokenizer.added_tokens,
        )


NO_FORMATS = Formats(None, None, {})


def has_place_for_tools(template: str) -> bool:
    """Whether a chat template renders tools; others are told of them in text, see in_text.py."""
    return re.search(r"\btools\b", template) is not None


def tool_format(template: str, has_own: bool) -> ToolFormat | Whole | None:
    """The format of calls that a template shows; `has_own`: a response template parses them."""
    if not has_place_for_tools(template):
        return "hermes"
    for sign, name in TOOL_SIGNS:
        if sign in template:
            return name or (RESPONSE_TEMPLATE if has_own else None)
    return RESPONSE_TEMPLATE if has_own else None


def reasoning_format(template: str, has_own: bool) -> ReasoningFormat | Whole | None:
    """The format of reasoning that a template shows; `has_own`: a response template parses it."""
    for sign, name in REASONING_SIGNS:
        if sign in template:
            return name
    return RESPONSE_TEMPLATE if has_own else None
