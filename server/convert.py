"""Wire request -> engine Request.

A value comes from the request, else from the model's generation config, else from the OpenAI API.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from engine.config import EngineConfig
from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.request import Request, SamplingParams
from server.body import check_structure
from server.schema.chat import ChatMessage, ChatRequest
from server.schema.completions import CompletionRequest, Prompt
from server.schema.sampling import INT64

if TYPE_CHECKING:
    from engine import ModelInfo

# Arguments of apply_chat_template: a request that could set them would change how, not what, is rendered.
TEMPLATE_DENYLIST = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)
MAX_ANSWERS = 1024
# Templates walk their input by recursion; what people send is a few levels deep.
MAX_DEPTH = 64


class Tokenizer(Protocol):
    """What is used of the engine's TokenizerPool."""

    max_prompt_chars: int

    @property
    def chat_template(self) -> str | None: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]: ...


class Limits(NamedTuple):
    """What the served model and engine allow, and the defaults the model ships with."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_queued: int
    generation_defaults: dict[str, Any]

    @classmethod
    def of(cls, model: "ModelInfo", config: EngineConfig) -> "Limits":
        """An idle engine starts max_num_seqs requests and lets max_waiting wait."""
        return cls(
            model.max_model_len,
            model.vocab_size,
            config.max_num_seqs,
            config.max_num_seqs + config.max_waiting,
            model.generation_defaults,
        )


async def encode_chat(wire: ChatRequest, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """Token ids of a conversation. Raises InvalidRequest, ContextLengthExceeded."""
    has_json = wire.documents or wire.chat_template_kwargs or any(turn.tool_calls for turn in wire.messages)
    if has_json:  # may be long, and takes as long to look through
        messages, kwargs = await asyncio.to_thread(template_input, wire, tokenizer, limits)
    else:
        messages, kwargs = template_input(wire, tokenizer, limits)
    add_generation_prompt = wire.add_generation_prompt is not False and not wire.continue_final_message
    return await tokenizer.encode_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(wire.continue_final_message),
        template_kwargs=kwargs,
    )


def template_input(
    wire: ChatRequest, tokenizer: Tokenizer, limits: Limits
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and further variables for the chat template. Raises InvalidRequest, ContextLengthExceeded."""
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
    return messages, template_kwargs(wire)


async def encode_prompts(wire: CompletionRequest, tokenizer: Tokenizer, limits: Limits) -> list[list[int]]:
    """Token ids of each prompt; ids given by the client are checked, not changed."""
    return [await encode_prompt(prompt, wire, tokenizer, limits) for prompt in wire.prompt]


async def encode_prompt(
    prompt: Prompt, wire: CompletionRequest, tokenizer: Tokenizer, limits: Limits
) -> list[int]:
    """Token ids of one prompt."""
    if isinstance(prompt, list):
        check_ids(prompt, "prompt", limits)
        return prompt
    check_text(prompt, "prompt")
    check_length(len(prompt), tokenizer, limits, "prompt")
    return await tokenizer.encode(prompt, add_special_tokens=wire.add_special_tokens is not False)


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


def template_kwargs(wire: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template beside the messages. Raises InvalidRequest for reserved names."""
    kwargs: dict[str, Any] = {}
    effort = wire.reasoning_effort or (wire.reasoning and wire.reasoning.effort)
    if effort:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    for name, value in (wire.chat_template_kwargs or {}).items():
        if name in TEMPLATE_DENYLIST or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"{name[:64]!r} may not be set for the chat template.", "chat_template_kwargs"
            )
        kwargs[name] = value
    if wire.documents is not None:
        kwargs["documents"] = wire.documents
    return kwargs


def make_requests(
    wire: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    answer_id: str,
    limits: Limits,
    *,
    default_max_tokens: int | None,
    prompt_param: str,
) -> list[Request]:
    """One engine request per answer: index = prompt number * n + sample number, sample i with seed + i.

    The length a client asks for must fit; the default (None: all there is) is cut to fit.
    Raises InvalidRequest, ContextLengthExceeded.
    """
    n = wire.n or 1
    max_tokens, limit_param = wire.limit
    if n > limits.max_num_seqs:
        raise InvalidRequest(f"n must be at most {limits.max_num_seqs} on this server.", "n")
    most = min(MAX_ANSWERS, limits.max_queued)
    if n * len(prompts) > most:  # it would be refused as too much for the queue, however idle the server is
        param = "n" if n > 1 else prompt_param
        raise InvalidRequest(
            f"{param} asks for {n * len(prompts)} answers; this server queues at most {most}.", param
        )
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("The prompt has no tokens.", prompt_param)
        room = limits.max_model_len - len(prompt)
        if room < 1:
            raise overflow(limits, f"your prompt has {len(prompt)} tokens", prompt_param)
        if max_tokens is not None and max_tokens > room:
            asked = f"you asked for {len(prompt)} tokens of prompt and {max_tokens} of output ({limit_param})"
            raise overflow(limits, asked, limit_param)
        sampling = sampling_params(wire, limits, max_tokens or min(room, default_max_tokens or room))
        token_ids = tuple(prompt)
        for sample in range(n):
            if sampling.seed is not None and sample:
                seed = (sampling.seed + 1 + INT64) % (2 * INT64) - INT64
                sampling = replace(sampling, seed=seed)
            requests.append(Request(f"{answer_id}-{len(requests)}", token_ids, sampling))
    return requests


def sampling_params(wire: ChatRequest | CompletionRequest, limits: Limits, max_tokens: int) -> SamplingParams:
    """Final values of every sampling parameter of an answer. Raises InvalidRequest."""
    if wire.min_tokens and wire.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {max_tokens}.", "min_tokens")
    bias = tuple((int(token_id), value) for token_id, value in (wire.logit_bias or {}).items())
    check_ids([token_id for token_id, _ in bias], "logit_bias", limits)
    check_ids(wire.stop_token_ids or (), "stop_token_ids", limits)
    for text in wire.stop or ():
        check_text(text, "stop")

    def choose(name: str, fallback: float) -> float:
        value = getattr(wire, name)
        return float(value if value is not None else limits.generation_defaults.get(name, fallback))

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=wire.min_tokens or 0,
        temperature=choose("temperature", 1.0),
        top_p=choose("top_p", 1.0),
        top_k=max(0, int(choose("top_k", 0))),
        min_p=choose("min_p", 0.0),
        seed=wire.seed,
        presence_penalty=wire.presence_penalty or 0.0,
        frequency_penalty=wire.frequency_penalty or 0.0,
        repetition_penalty=choose("repetition_penalty", 1.0),
        logit_bias=bias,
        stop=wire.stop or (),
        stop_token_ids=frozenset(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        include_stop_str_in_output=bool(wire.include_stop_str_in_output),
        skip_special_tokens=wire.skip_special_tokens is not False,
    )


def check_ids(token_ids: Sequence[int], param: str, limits: Limits) -> None:
    """Every id must have a logit: an id beyond would read or write another row."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} in {param} is out of range: ids go from 0 to {limits.vocab_size - 1}.",
                param,
            )


def check_text(text: str, param: str) -> None:
    """NUL is no text, and what follows it is lost on the way through C strings."""
    if "\0" in text:
        raise InvalidRequest(f"{param} must not contain NUL characters.", param)


def check_length(num_chars: int, tokenizer: Tokenizer, limits: Limits, param: str) -> None:
    """Refuse text before it is tokenized if it is too long however well it compresses."""
    if num_chars > tokenizer.max_prompt_chars:
        raise overflow(limits, f"your {param} has {num_chars} characters, which cannot fit", param)


def overflow(limits: Limits, what: str, param: str) -> ContextLengthExceeded:
    """Clients find this error by the beginning of its message."""
    return ContextLengthExceeded(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, {what}. "
        "Please reduce the length of the prompt or of the completion.",
        param,
    )
