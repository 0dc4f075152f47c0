"""The formats by name. Each is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from server.parsing.parser import ToolParser
    from server.parsing.reasoning import ReasoningParser

ToolFormat = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
ReasoningFormat = Literal["think", "mistral"]
# The tokenizer's own template, for all of an answer.
Whole = Literal["response_template"]
RESPONSE_TEMPLATE: Whole = "response_template"
# What the settings may be.
ToolSetting = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "response_template"
]
ReasoningSetting = Literal["auto", "none", "think", "mistral", "response_template"]

TOOL_PARSERS: dict[ToolFormat, str] = {
    "hermes": "server.parsing.formats.hermes:HermesParser",
    "llama3_json": "server.parsing.formats.llama:LlamaParser",
    "mistral": "server.parsing.formats.mistral:MistralParser",
    "pythonic": "server.parsing.formats.pythonic:PythonicParser",
    "qwen3_coder": "server.parsing.formats.qwen_coder:QwenCoderParser",
}
REASONING_PARSERS: dict[ReasoningFormat, str] = {
    "think": "server.parsing.reasoning:ThinkParser",
    "mistral": "server.parsing.reasoning:MistralThinkParser",
}


def tool_parser(name: ToolFormat) -> "type[ToolParser]":
    """The parser of a format."""
    found: type[ToolParser] = load(TOOL_PARSERS[name])
    return found


def reasoning_parser(name: ReasoningFormat) -> "type[ReasoningParser]":
    """The parser of a format."""
    found: type[ReasoningParser] = load(REASONING_PARSERS[name])
    return found


def load(path: str) -> type:
    """The class at `module:name`."""
    module, _, name = path.partition(":")
    found: type = getattr(import_module(module), name)
    return found
