"""The Anthropic API's conversation -> the chat request with the same prompt."""

from typing import Any

from pydantic import ValidationError

from engine.errors import InvalidRequest
from server.errors import invalid_request
from server.limits import check_text
from server.prompt import measure
from server.schema.anthropic import Conversation, InputBlock, MessagesRequest
from server.schema.chat import ChatRequest
from server.schema.sampling import Sampling
from server.schema.tools import MAX_TOOL_CALLS


def chat_request(wire: Conversation) -> ChatRequest:
    """Return the chat request with this conversation and sampling. Raises InvalidRequest.

    The limit of the answer's length is left out: here it is a default that is cut to what fits.
    """
    messages: list[dict[str, Any]] = []
    if wire.system:
        for position, part in enumerate(wire.system):
            check_text(part.text, f"system[{position}].text")
        messages.append({"role": "system", "content": [text_part(part.text) for part in wire.system]})
    for number, message in enumerate(wire.messages):
        for position, block in enumerate(message.content):
            check_block(block, f"messages[{number}].content[{position}]")
        if sum(block.type == "tool_use" for block in message.content) > MAX_TOOL_CALLS:
            raise InvalidRequest(f"a turn has {MAX_TOOL_CALLS} calls at most.", f"messages[{number}].content")
        for turn in TURNS[message.role](message.content):
            add_turn(messages, turn)
    is_open = wire.messages[-1].role == "assistant"
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": is_open,
        "add_generation_prompt": not is_open,
    }
    if wire.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": wire.thinking.type != "disabled"}
    if wire.tools:
        fields["tools"] = [tool.for_chat for tool in wire.tools]
    if wire.tool_choice is not None:
        fields["tool_choice"] = wire.tool_choice.for_chat
        fields["parallel_tool_calls"] = not wire.tool_choice.disable_parallel_tool_use
    if wire.output_config is not None:
        fields["reasoning_effort"] = wire.output_config.effort
    form = wire.output_format or (wire.output_config and wire.output_config.format)
    if form:
        schema = {"schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(wire, MessagesRequest):
        fields |= wire.model_dump(include=set(Sampling.model_fields))
        fields["stop"] = list(wire.stop_sequences or ()) or None
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # more turns than chat takes: a message may become several
        raise invalid_request(error, fields) from None


def check_block(block: InputBlock, path: str) -> None:
    """Refuse NUL characters and deep nesting, under their names in this API. Raises InvalidRequest."""
    for name in ("text", "thinking", "id", "name", "tool_use_id"):
        check_text(getattr(block, name) or "", f"{path}.{name}")
    measure(block.input, f"{path}.input")
    for position, inner in enumerate(block.content or ()):
        check_text(inner.text or "", f"{path}.content[{position}].text")


def user_turns(blocks: list[InputBlock]) -> list[dict[str, Any]]:
    """Return the turns of the user and of tools, in their order."""
    turns: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "tool_result":
            parts = [text_part(inner.text or "") for inner in block.content or () if inner.type == "text"]
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})
        else:
            add_turn(turns, {"role": "user", "content": [text_part(block.text or "")]})
    return turns or [{"role": "user", "content": []}]


def assistant_turns(blocks: list[InputBlock]) -> list[dict[str, Any]]:
    """Return reasoning, text and calls of the assistant as one turn."""
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": [text_part(block.text or "") for block in blocks if block.type == "text"],
    }
    if thoughts := [block.thinking or "" for block in blocks if block.type == "thinking"]:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if block.type == "tool_use"]:
        turn["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.input}} for call in calls
        ]
    return [turn]


def system_turns(blocks: list[InputBlock]) -> list[dict[str, Any]]:
    """Return the instructions as one turn."""
    return [{"role": "system", "content": [text_part(block.text or "") for block in blocks]}]


TURNS = {"user": user_turns, "assistant": assistant_turns, "system": system_turns}


def add_turn(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Append a turn, or add it to the one before if both are plain and of the same role."""
    if turns and turns[-1].keys() == turn.keys() == {"role", "content"} and turns[-1]["role"] == turn["role"]:
        turns[-1]["content"] += turn["content"]
    else:
        turns.append(turn)


def text_part(text: str) -> dict[str, str]:
    """A content part of chat."""
    return {"type": "text", "text": text}
