"""The formats in which models write tool calls and reasoning: one file each, and one line in a list here.

Names, detection by chat templates and grammars of forced calls are read off the parsers.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from server.parsing.whole import WholeParser

if TYPE_CHECKING:
    from server.parsing.parser import ToolParser
    from server.parsing.reasoning import ReasoningParser

# In the order in which a chat template is searched for their signs.
TOOL_FORMATS = (
    "server.parsing.formats.harmony:HarmonyParser",
    "server.parsing.formats.glm:GlmParser",
    "server.parsing.formats.minimax_m2:MiniMaxM2Parser",
    "server.parsing.formats.minimax_m3:MiniMaxM3Parser",
    "server.parsing.formats.deepseek_v32:DeepSeekV32Parser",
    "server.parsing.formats.seed_oss:SeedParser",
    "server.parsing.formats.qwen_coder:QwenCoderParser",
    "server.parsing.formats.functionary:FunctionaryParser",
    "server.parsing.formats.minimax:MiniMaxParser",
    "server.parsing.formats.nemotron:NemotronParser",
    "server.parsing.formats.hermes:HermesParser",
    "server.parsing.formats.deepseek:DeepSeekParser",
    "server.parsing.formats.kimi:KimiParser",
    "server.parsing.formats.function_gemma:FunctionGemmaParser",
    "server.parsing.formats.gemma4:Gemma4Parser",
    "server.parsing.formats.cohere:CohereParser",
    "server.parsing.formats.phi4_mini:Phi4MiniParser",
    "server.parsing.formats.granite:GraniteParser",
    "server.parsing.formats.internlm:InternLMParser",
    "server.parsing.formats.mistral:MistralParser",
    "server.parsing.formats.llama:LlamaParser",
    "server.parsing.formats.pythonic:PythonicParser",
)
REASONING_FORMATS = (
    "server.parsing.formats.minimax_think:MiniMaxThinkParser",
    "server.parsing.formats.gemma4_think:Gemma4ThinkParser",
    "server.parsing.formats.apriel_think:AprielThinkParser",
    "server.parsing.formats.mistral_think:MistralThinkParser",
    "server.parsing.formats.seed_think:SeedThinkParser",
    "server.parsing.formats.cohere_think:CohereThinkParser",
    "server.parsing.formats.granite_think:GraniteThinkParser",
    "server.parsing.formats.think_response:ThinkResponseParser",
    "server.parsing.formats.think:ThinkParser",
)


def tool_formats() -> "dict[str, type[ToolParser]]":
    """Return the parsers of tool calls by name."""
    return {parser.name: parser for parser in map(_load, TOOL_FORMATS)}


def whole_formats() -> dict[str, type[WholeParser]]:
    """Return those parsers of tool calls that parse all of an answer, its reasoning too, by name."""
    return {name: parser for name, parser in tool_formats().items() if issubclass(parser, WholeParser)}


def reasoning_formats() -> "dict[str, type[ReasoningParser]]":
    """Return the parsers of reasoning by name."""
    return {parser.name: parser for parser in map(_load, REASONING_FORMATS)}


@cache
def _load(path: str) -> Any:
    """Import the class at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
