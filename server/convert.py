"""Wire request -> engine Request.

A value comes from the request, else from the model's generation config, else from the OpenAI API.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import orjson

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.request import Request, SamplingParams
from server.schema.chat import ChatMessage, ChatRequest
from server.schema.completions import CompletionRequest, Prompt
from server.schema.sampling import INT64, SamplingRequest

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
    generation_defaults: dict[str, Any]


async def encode_chat(wire: ChatRequest, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    """Token ids of a conversation. Raises InvalidRequest, ContextLengthExceeded."""
    template = tokenizer.chat_template or ""
    messages = [
        template_message(message, knows_developer="developer" in template) for message in wire.messages
    ]
    num_chars = 0
    for position, message in enumerate(messages):
        check_text(message["content"], f"messages[{position}].content")
        num_chars += len(message["content"])
    check_length(num_chars, tokenizer, limits, "messages")
    add_generation_prompt = wire.add_generation_prompt is not False and not wire.continue_final_message
    return await tokenizer.encode_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(wire.continue_final_message),
        template_kwargs=template_kwargs(wire),
    )


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


def template_message(message: ChatMessage, *, knows_developer: bool) -> dict[str, Any]:
    """A message as chat templates expect it: text content, tool arguments as a mapping."""
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
                    "arguments": parse_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return rendered


def parse_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments of an earlier tool call as the mapping most templates want; what is no JSON stays text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments


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
    wire: SamplingRequest,
    prompts: Sequence[list[int]],
    answer_id: str,
    limits: Limits,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    prompt_param: str,
) -> list[Request]:
    """One engine request per answer: index = prompt number * n + sample number, sample i with seed + i.

    `max_tokens` is what the client asked for and must fit; the default (None: all there is) is cut to fit.
    Raises InvalidRequest, ContextLengthExceeded.
    """
    n = wire.n or 1
    if n > limits.max_num_seqs:
        raise InvalidRequest(f"n must be at most {limits.max_num_seqs} on this server.", "n")
    if n * len(prompts) > MAX_ANSWERS:
        raise InvalidRequest(f"n times the number of prompts must be at most {MAX_ANSWERS}.", "n")
    requests: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("The prompt has no tokens.", prompt_param)
        room = limits.max_model_len - len(prompt)
        if room < 1:
            raise overflow(limits, f"your prompt has {len(prompt)} tokens", prompt_param)
        if max_tokens is not None and max_tokens > room:
            asked = f"you asked for {len(prompt)} tokens of prompt and {max_tokens} of output"
            raise overflow(limits, asked, prompt_param)
        sampling = sampling_params(wire, limits, max_tokens or min(room, default_max_tokens or room))
        token_ids = tuple(prompt)
        for sample in range(n):
            if sampling.seed is not None and sample:
                seed = (sampling.seed + 1 + INT64) % (2 * INT64) - INT64
                sampling = replace(sampling, seed=seed)
            requests.append(Request(f"{answer_id}-{len(requests)}", token_ids, sampling))
    return requests


def sampling_params(wire: SamplingRequest, limits: Limits, max_tokens: int) -> SamplingParams:
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
