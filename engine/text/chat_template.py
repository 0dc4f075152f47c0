"""Renders conversations with a chat template, as transformers' apply_chat_template does."""

import json
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.defaults import DEFAULT_NAMESPACE

from engine.text.template_sandbox import Rendering, TemplateRefusal, TemplateSandbox

TEMPLATE_FILES = ("<template>", "<unknown>")  # as Jinja calls a template's source in tracebacks
# Variables of templates that hold the texts of special tokens, as transformers names them.
SPECIAL_TOKENS = frozenset(
    ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
)
# Variables and functions that every template has.
GIVEN = frozenset(("messages", "raise_exception", "strftime_now"))
# Parameters of transformers' functions that render templates, but for those that are data for the template.
PARAMETERS = frozenset(
    (
        *("self", "conversation", "conversations", "chat_template", "kwargs", "tokenizer_kwargs", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    )
)
# Names that a client must not set: templates have them already, or users of transformers mean its parameters.
RESERVED_VARIABLES = SPECIAL_TOKENS | GIVEN | PARAMETERS | DEFAULT_NAMESPACE.keys()
# Names that templates read a message's reasoning under. The first is the usual one.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Roles of messages that instruct the model.
SYSTEM_ROLES = ("system", "developer")
PROBE_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "How are you?"},
]
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "What."}},
            "required": ["at"],
        },
    },
}
PROBE_SECONDS = 5.0
PROBE_CHARS = 2**20
# Marks the end of a message that is to be continued. Its last space shows if the template strips messages.
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ConversationError(ValueError):
    """No template could render this conversation as it was asked for."""


class ChatTemplate:
    """A compiled chat template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any] | None = None) -> None:
        """Compile. Raises TemplateSyntaxError, or what Python raises when it compiles the generated code."""
        self._source = source
        self._special_tokens = special_tokens or {}
        self._sandbox = TemplateSandbox()
        self._template = self._sandbox.template(source)
        self._no_tools: list[Any] | None = None  # what the template gets for a conversation without tools

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        rendering: Rendering,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        max_chars: int,
    ) -> str:
        """Return the text of a conversation; `variables` may hold tools and documents.

        Raises whatever the template raises, ConversationError for a conversation that cannot be continued,
        ContextLengthExceeded beyond `max_chars` characters, and InvalidRequest at the rendering's limits.
        """
        if not messages:
            raise ConversationError("there are no messages")
        if add_generation_prompt and continue_final_message:
            raise ConversationError("continue_final_message and add_generation_prompt exclude each other")
        if not all(isinstance(document, dict) for document in variables.get("documents") or ()):
            raise ConversationError("documents must be a list of objects")
        chat = [_readable(message) for message in messages]
        given = {"tools": self._no_tools, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        final_text = self._tag(chat) if continue_final_message else None
        text = self._sandbox.render(self._template, given, rendering, max_chars)
        return text if final_text is None else _cut_at_tag(text, final_text)

    def probe(self) -> None:
        """Render a conversation of two turns. Raises what the template raises, but for its own refusals.

        A template that fails without tools gets an empty list of them from now on, if it can render that.
        """
        try:
            self._render_probe()
        except Exception as error:  # a template is a program: it may raise any exception for its input
            self._no_tools = []
            try:
                self._render_probe()
            except Exception:
                self._no_tools = None
                raise error from None

    def needs_tools(self) -> bool:
        """Return True if the template, which fails without tools, renders a conversation with one."""
        try:
            self._render_probe([PROBE_TOOL])
        except Exception:  # see probe()
            return False
        return True

    def _render_probe(self, tools: list[Any] | None = None) -> None:
        with suppress(TemplateRefusal):
            self.render(
                PROBE_CHAT,
                {} if tools is None else {"tools": tools},
                Rendering(PROBE_SECONDS),
                add_generation_prompt=True,
                continue_final_message=False,
                max_chars=PROBE_CHARS,
            )

    def takes_system(self) -> bool:
        """Return True if the template renders a system message at the beginning."""
        return self._shows_in_order(("system", "user"))

    def takes_system_anywhere(self) -> bool:
        """Return True if the template renders every system message in its place, wherever it is.

        Other templates raise for a second or a later system message, or leave it out.
        """
        roles = [role for role in SYSTEM_ROLES if role == "system" or role in self._source]
        orders = [
            order for role in roles for order in (("system", role, "user"), ("system", "user", role, "user"))
        ]
        return all(map(self._shows_in_order, orders))

    def _shows_in_order(self, roles: Sequence[str]) -> bool:
        """Return True if the texts of messages with these roles are rendered one after the other."""
        texts = [f"[message {number}]" for number in range(len(roles))]
        try:
            rendered = self.render(
                [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)],
                {},
                Rendering(PROBE_SECONDS),
                add_generation_prompt=True,
                continue_final_message=False,
                max_chars=PROBE_CHARS,
            )
        except Exception:  # a template is a program: it may raise any exception for its input
            return False
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _tag(self, chat: list[dict[str, Any]]) -> str:
        """Put a tag at the end of the last message's text, and return the text."""
        content = chat[-1].get("content")
        if content is None or "content" not in self._source:
            raise ConversationError("the final message has no content to continue")
        if not isinstance(content, list):
            chat[-1]["content"] = content + CONTINUE_TAG
            return str(content)
        for number, block in reversed(list(enumerate(content))):
            if "text" in block:
                tagged = {**block, "text": block["text"] + CONTINUE_TAG}
                chat[-1]["content"] = [*content[:number], tagged, *content[number + 1 :]]
                return str(block["text"])
        raise ConversationError("the final message has no text to continue")


class _Arguments(dict[str, Any]):
    """The arguments of a call: a mapping, which most templates want, that `+` joins to text as JSON.

    Templates of DeepSeek join them, as transformers passes on whatever a client sends.
    """

    def __add__(self, text: str) -> str:
        return json.dumps(self, ensure_ascii=False) + text

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _readable(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without null fields, and with its reasoning under the names that templates read.

    The content beside calls stays null: templates of DeepSeek look for that.
    """
    calls = message.get("tool_calls")
    message = {
        key: value for key, value in message.items() if value is not None or (calls and key == "content")
    }
    if calls:
        message["tool_calls"] = [_readable_call(call) for call in calls]
    for name in REASONING_FIELDS:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _readable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(function["arguments"])}}


def _cut_at_tag(text: str, final_text: str) -> str:
    """Return a rendered conversation up to the tag. Raises ConversationError if the message is not in it."""
    tag = CONTINUE_TAG.strip()
    end = text.rfind(tag)
    if end < 0 or final_text.strip() not in text:
        raise ConversationError(
            "the final message cannot be continued: the template does not show it as it is"
        )
    if text.startswith(CONTINUE_TAG, end):
        return text[:end]
    return text[:end].rstrip()  # the template strips messages


def is_plain(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> bool:
    """Check that every template should render or refuse a conversation, and fail only by its own fault.

    Such are texts of user and assistant in turn, perhaps after a system message, without variables.
    """
    roles = [message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    return (
        not any(value is not None for value in variables.values())
        and turns == (["user", "assistant"] * len(turns))[: len(turns)]
        and turns[-1:] == ["user"]
        and all(message.keys() <= {"role", "content"} for message in messages)
        and all(isinstance(message.get("content"), str) for message in messages)
    )


def place_of(error: Exception) -> str:
    """Return the line of the template that an error is from, as the end of a message."""
    if isinstance(error, TemplateSyntaxError):
        return f" (line {error.lineno})"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in TEMPLATE_FILES
    ]
    return f" (line {frames[-1].lineno})" if frames else ""


def read_template(path: Path) -> str:
    """Return the Jinja source in a file. Raises ValueError, naming the setting, if there is none."""
    try:
        source = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"chat_template: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"chat_template: {path} is not text in UTF-8") from None
    if not source.strip():
        raise ValueError(f"chat_template: {path} is empty")
    try:
        ChatTemplate(source)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template: {path} has an error in line {error.lineno}: {error.message}"
        ) from None
    except Exception as error:  # Python may refuse the generated code, for example if it is nested too deeply
        raise ValueError(f"chat_template: {path} does not compile: {error}") from None
    return source
