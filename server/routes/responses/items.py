"""A response and the items of its output, from the request and the blocks of the answer."""

from collections.abc import Sequence
from typing import Any, Literal

from engine.outputs import FinishReason, OutputToken
from server.answer import Answer, Delta
from server.limits import Limits
from server.logprobs import TokenDetails
from server.parsing.content_blocks import Block, Kind, blocks_of
from server.schema.logprobs import TokenLogprob
from server.schema.responses import (
    FunctionTool,
    IncompleteDetails,
    InputChoice,
    InputDetails,
    ItemStatus,
    JsonObject,
    JsonSchema,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PlainText,
    ReasoningSettings,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    TextSettings,
)

ID_PREFIXES: dict[Kind, str] = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def item_id(answer: Answer, block: Block) -> str:
    """The id of the item that a block is: the first message has the response's number, the others theirs."""
    number = f"_{block.number}" if block.number else ""
    return answer.id.replace("resp_", ID_PREFIXES[block.kind]) + number


def text_of(block: Block, details: TokenDetails) -> OutputText:
    """Return the text of a block, with its logprobs if the answer has them."""
    return OutputText(text=block.text, logprobs=logprobs_of(block.tokens, details))


def logprobs_of(tokens: Sequence[OutputToken], details: TokenDetails) -> list[TokenLogprob]:
    """Return the logprobs of the shown ones of `tokens`; none if the answer does not have them."""
    logprobs = details.chat(tokens)
    return [] if logprobs is None else logprobs.content


def item_of(answer: Answer, block: Block, status: ItemStatus, details: TokenDetails) -> OutputItem:
    """A block as an item of the output; one in progress has no content yet."""
    name = item_id(answer, block)
    if block.kind == "call":
        return OutputCall(id=name, status=status, call_id=block.id, name=block.name, arguments=block.text)
    has_content = status != "in_progress"
    if block.kind == "reasoning":
        thought = [ReasoningText(text=block.text)] if has_content else []
        return OutputReasoning(id=name, status=status, content=thought)
    said = [text_of(block, details)] if has_content else []
    return OutputMessage(id=name, status=status, content=said)


def status_of(block: Block) -> ItemStatus:
    """Return how a block ended; a call may have been cut at a stop string, too."""
    is_broken = block.is_cut or (block.kind == "call" and not block.is_complete)
    return "incomplete" if is_broken else "completed"


def begun(answer: Answer, wire: ResponsesRequest, limits: Limits) -> ResponseObject:
    """The response before there is any output."""
    defaults = limits.generation_defaults
    return ResponseObject(
        id=answer.id,
        created_at=answer.created,
        status="in_progress",
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        metadata=wire.metadata or {},
        model=answer.model,
        output=[],
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        reasoning=ReasoningSettings(effort=wire.reasoning.effort if wire.reasoning else None),
        temperature=defaults.get("temperature", 1.0) if wire.temperature is None else wire.temperature,
        tool_choice=choice_of(wire.tool_choice),
        tools=[
            FunctionTool(
                name=tool.name or "",
                description=tool.description,
                parameters=tool.parameters,
                strict=bool(tool.strict),
            )
            for tool in wire.tools or ()
        ],
        top_logprobs=wire.top_logprobs or 0,
        top_p=defaults.get("top_p", 1.0) if wire.top_p is None else wire.top_p,
        text=TextSettings(format=text_format(wire)),
        usage=None,
    )


def text_format(wire: ResponsesRequest) -> PlainText | JsonObject | JsonSchema:
    """Return the requested form of the text."""
    form = wire.text and wire.text.format
    if not form or form.type == "text":
        return PlainText()
    if form.type == "json_object":
        return JsonObject()
    return JsonSchema(
        name=form.name,
        description=form.description,
        schema_=form.schema_ or {},
        strict=form.strict is not False,
    )


def choice_of(choice: InputChoice | None) -> Literal["none", "auto", "required"] | dict[str, Any]:
    """The choice as the API writes it: a word, or an object with what its type needs."""
    if choice is None:
        return "auto"
    if choice.type == "function":
        return {"type": "function", "name": choice.name}
    if choice.type == "allowed_tools":
        tools = [{"type": "function", "name": tool.name} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.type


def ended(
    response: ResponseObject, answer: Answer, delta: Delta, blocks: list[Block], details: TokenDetails
) -> ResponseObject:
    """The response with its whole output."""
    is_cut = delta.finish_reason is FinishReason.LENGTH
    counts = answer.counts()
    usage = ResponseUsage(
        input_tokens=counts.prompt,
        input_tokens_details=InputDetails(cached_tokens=counts.cached),
        output_tokens=counts.completion,
        output_tokens_details=OutputDetails(reasoning_tokens=counts.reasoning),
        total_tokens=counts.prompt + counts.completion,
    )
    return response.model_copy(
        update={
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": IncompleteDetails() if is_cut else None,
            "output": [item_of(answer, block, status_of(block), details) for block in blocks],
            "usage": usage,
        }
    )


def whole(
    response: ResponseObject, answer: Answer, delta: Delta, details: TokenDetails, *, is_call: bool = False
) -> ResponseObject:
    """Return the response to an answer that comes at once. One without text still has its message.

    `is_call`: the answer had to be a call, which may have been cut before it began; then there is no item.
    """
    blocks = blocks_of(delta)
    if not blocks and not is_call:
        blocks = [empty_block(delta)]
    return ended(response, answer, delta, blocks, details)


def empty_block(delta: Delta) -> Block:
    """Return the message of an answer without text."""
    return Block(0, "text", is_cut=delta.finish_reason is FinishReason.LENGTH)
