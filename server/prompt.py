"""The prompt of a wire request -> token ids: chats by the model's template, texts and ids as they are.

Whatever reaches the template or the tokenizer is looked through first: its size, its depth, NUL characters.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from engine import TokenizerPool
from engine.errors import InvalidRequest
from server.body import check_structure
from server.limits import Limits, check_ids, check_text, overflow
from server.parsing.detect import NO_FORMATS, Formats, has_place_for_tools
from server.parsing.system_turns import merge_system_turns
from server.parsing.template_needs import adapted, with_switch
from server.parsing.tool_choice import offered_tools, prompt_format
from server.parsing.tools_in_prompt import with_instructions
from server.schema.chat import ChatMessage, ChatRequest
from server.schema.completions import CompletionRequest, Prompt
from server.schema.refused_fields import UnsupportedField

# Templates walk their input by recursion; what people send is a few levels deep.
MAX_DEPTH = 64


async def encode_chat(
    wire: ChatRequest, tokenizer: TokenizerPool, limits: Limits, formats: Formats = NO_FORMATS
) -> list[int]:
    """Token ids of a conversation. Raises InvalidRequest, UnsupportedField, ContextLengthExceeded."""
    has_json = (
        wire.documents
        or wire.chat_template_kwargs
        or wire.tools
        or any(turn.tool_calls for turn in wire.messages)
    )
    if has_json:  # may be long, and takes as long to look through
        messages, kwargs = await asyncio.to_thread(template_input, wire, tokenizer, limits, formats)
    else:
        messages, kwargs = template_input(wire, tokenizer, limits, formats)
    add_generation_prompt = wire.add_generation_prompt is not False and not wire.continue_final_message
    ids = await tokenizer.encode_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(wire.continue_final_message),
        template_kwargs=kwargs,
    )
    return truncated(ids, wire, limits)


def template_input(
    wire: ChatRequest, tokenizer: TokenizerPool, limits: Limits, formats: Formats
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and further variables for the chat template.

    Raises InvalidRequest, UnsupportedField, ContextLengthExceeded.
    """
    knows_developer = "developer" in (tokenizer.chat_template or "")
    messages = []
    num_chars = 0
    for position, message in enumerate(wire.messages):
        path = f"messages[{position}]"
        messages.append(template_message(message, path, knows_developer=knows_developer))
        num_chars += sum(measure(value, place) for place, value in values_of(messages[-1], path))
    check_length(num_chars, tokenizer, limits, "messages")
    for name in ("chat_template_kwargs", "documents"):
        check_length(measure(getattr(wire, name), name), tokenizer, limits, name)
    tools = [tool.function.for_template for tool in offered_tools(wire)]
    check_length(measure(tools, "tools"), tokenizer, limits, "tools")
    kwargs = template_kwargs(wire, tokenizer.reserved_variables)
    if not tokenizer.takes_system_anywhere:
        messages = merge_system_turns(messages)
    template = tokenizer.tool_template or ""
    parser = prompt_format(wire, formats, template)
    messages = adapted(template, messages, tools, parser)
    kwargs = with_switch(template, kwargs)
    if not tools:
        return messages, kwargs
    if parser is None or has_place_for_tools(template):
        return messages, kwargs | {"tools": tools}
    return with_instructions(messages, tools, parser, takes_system=tokenizer.takes_system), kwargs


async def encode_prompts(
    wire: CompletionRequest, tokenizer: TokenizerPool, limits: Limits
) -> list[list[int]]:
    """Token ids of each prompt; ids given by the client are checked, not changed."""
    add_special_tokens = wire.add_special_tokens is not False
    if wire.suffix:
        return await encode_infills(wire, wire.suffix, tokenizer, limits)
    prompts = await encode_each(
        wire.prompt, tokenizer, limits, add_special_tokens=add_special_tokens, param="prompt"
    )
    return [truncated(ids, wire, limits) for ids in prompts]


def truncated(ids: list[int], wire: ChatRequest | CompletionRequest, limits: Limits) -> list[int]:
    """Return the part of a prompt that a request keeps; -1 leaves room for its output, or for one token."""
    most = wire.truncate_prompt_tokens
    if most is None:
        return ids
    if most < 0:
        max_tokens, _ = wire.limit
        most = max(1, limits.max_model_len - (1 if max_tokens is None else max_tokens))
    return ids[:most] if wire.truncation_side == "right" else ids[-most:]


async def encode_infills(
    wire: CompletionRequest, suffix: str, tokenizer: TokenizerPool, limits: Limits
) -> list[list[int]]:
    """Return for each prompt the token ids that ask for the text between it and `suffix`."""
    infill = tokenizer.infill
    if infill is None:
        raise UnsupportedField("suffix is not supported: this model has no tokens for it.", "suffix")
    if wire.echo:
        raise UnsupportedField("echo is not supported together with suffix.", "echo")
    if wire.truncate_prompt_tokens:
        raise UnsupportedField(
            "truncate_prompt_tokens is not supported together with suffix.", "truncate_prompt_tokens"
        )
    plain = {"add_special_tokens": False}
    [start] = [[]] if wire.add_special_tokens is False else await tokenizer.encode_batch([""])
    after = await encode_prompt(suffix, tokenizer, limits, param="suffix", **plain)
    prompts = await encode_each(wire.prompt, tokenizer, limits, param="prompt", **plain)
    return [infill.prompt(start, before, after) for before in prompts]


async def encode_prompt(
    prompt: Prompt, tokenizer: TokenizerPool, limits: Limits, *, add_special_tokens: bool, param: str
) -> list[int]:
    """Token ids of one prompt, which is the field `param`."""
    [ids] = await encode_each([prompt], tokenizer, limits, add_special_tokens=add_special_tokens, param=param)
    return ids


async def encode_each(
    prompts: Sequence[Prompt],
    tokenizer: TokenizerPool,
    limits: Limits,
    *,
    add_special_tokens: bool,
    param: str,
) -> list[list[int]]:
    """Token ids of each prompt, which are the field `param` or its items."""
    texts: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, list):
            check_ids(prompt, param, limits)
        else:
            check_text(prompt, param)
            check_length(len(prompt), tokenizer, limits, param)
            texts.append(prompt)
    encoded = iter(await tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens))
    return [prompt if isinstance(prompt, list) else next(encoded) for prompt in prompts]


def template_message(message: ChatMessage, path: str, *, knows_developer: bool) -> dict[str, Any]:
    """A message as chat templates expect it: text content, tool arguments as a mapping.

    `path` is its place in the request. Raises InvalidRequest.
    """
    role = "system" if message.role == "developer" and not knows_developer else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.plain_text}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": parse_arguments(
                        call.function.arguments, f"{path}.tool_calls[{number}].function.arguments"
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return rendered


def parse_arguments(arguments: str | dict[str, Any] | None, param: str) -> Any:
    """Arguments of an earlier tool call as the mapping most templates want; what is no JSON stays text.

    Raises InvalidRequest for what would take long to parse.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    check_structure(arguments.encode(), param)
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments


def values_of(message: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Everything of a template message that a client wrote, with its place in the request."""
    for name, value in message.items():
        if name not in ("role", "tool_calls"):
            yield f"{path}.{name}", value
    for number, call in enumerate(message.get("tool_calls", ())):
        place = f"{path}.tool_calls[{number}]"
        yield f"{place}.id", call["id"]
        for name, value in call["function"].items():
            yield f"{place}.function.{name}", value


def measure(value: Any, param: str) -> int:
    """Characters that a JSON value brings into the prompt, at least: its strings, and one for each item.

    Raises InvalidRequest for NUL characters and for deep nesting.
    """
    num_chars = 0
    levels = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in levels:
            if isinstance(item, str):
                check_text(item, param)
                num_chars += len(item)
            elif isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif item is not None:
                num_chars += 1
        if not deeper:
            return num_chars
        levels = deeper
    raise InvalidRequest(f"{param} must not be nested deeper than {MAX_DEPTH} levels.", param)


def template_kwargs(wire: ChatRequest, reserved: frozenset[str]) -> dict[str, Any]:
    """Variables for the chat template beside the messages and tools.

    Raises InvalidRequest for those that would change how, not what, is rendered.
    """
    kwargs: dict[str, Any] = {}
    effort = wire.reasoning_effort or (wire.reasoning and wire.reasoning.effort)
    if effort:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    for name, value in (wire.chat_template_kwargs or {}).items():
        place = f"chat_template_kwargs.{name[:64]}"
        if name in reserved or name == "tools" or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(f"{name[:64]!r} may not be set for the chat template.", place)
        if name == "documents" and not is_documents(value):
            raise InvalidRequest(f"{place} must be a list of objects.", place)
        kwargs[name] = value
    if wire.documents is not None:
        kwargs["documents"] = wire.documents
    return kwargs


def is_documents(value: Any) -> bool:
    """Check that a value may be used as the field `documents`."""
    return value is None or (isinstance(value, list) and all(isinstance(item, dict) for item in value))


def check_length(num_chars: int, tokenizer: TokenizerPool, limits: Limits, param: str) -> None:
    """Refuse text before it is tokenized if it is too long however well it compresses.

    Also where it is only counted or will be cut: 8 MB take one of the few tokenizer threads 10 seconds.
    """
    if num_chars > tokenizer.max_prompt_chars:
        raise overflow(limits, f"there are {num_chars} characters in your {param}, which cannot fit", param)
