"""A model's tokenizer and chat template: renders conversations, encodes and decodes text."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError

from engine.control_tokens import OwnText, TextParts
from engine.errors import ContextLengthExceeded, InvalidRequest, TemplateFault
from engine.text.chat_template import (
    RESERVED_VARIABLES,
    ChatTemplate,
    ConversationError,
    is_plain,
    place_of,
)
from engine.text.template_sandbox import Rendering, TemplateRefusal
from engine.text.token_bytes import TokenPieces
from engine.text.tokenizer_source import read_source

logger = logging.getLogger("monoloop.engine")

# Private-use characters without a meaning for any tokenizer. The first two enclose control tokens in user
# text while the template runs (so that a template can still find `</think>`); the last one splits them
# afterwards.
START, END, BREAK = "\U000f0000", "\U000f0001", "\U000f0002"
ESCAPED_START = re.compile(r"\\U000f0000|\\udb80\\udc00", re.IGNORECASE)
ESCAPED_END = re.compile(r"\\U000f0001|\\udb80\\udc01", re.IGNORECASE)


class Tokenizer:
    """A model's tokenizer and chat template. Blocking; safe to call from several threads.

    `chat_template` is Jinja source that replaces the model's own.

    Only the Rust tokenizer encodes and decodes: the Python wrapper sets padding and truncation on every call,
    which is not thread-safe. And only its batch functions release the GIL: with encode() 200,000 characters
    of Chinese blocked the event loop for 660 ms, with encode_batch() for 5 ms.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        source = read_source(folder)
        self._hf = source.hf
        self.backend: Any = source.backend
        self.backend.no_truncation()
        self.backend.no_padding()
        self.pieces = TokenPieces(self.backend)
        added_tokens = self.backend.get_added_tokens_decoder()
        added = [token.content for token in added_tokens.values() if not token.content.isspace()]
        added.sort(key=len, reverse=True)
        control_tokens = "|".join(map(re.escape, added)) or "(?!)"
        self._control_tokens = re.compile(control_tokens)
        self._marked_tokens = re.compile(f"{START}({control_tokens}){END}")
        vocab = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.max_token_chars = max(map(len, vocab))
        self._special_tokens = source.special_tokens
        self.eos_token = self._special_tokens.get("eos_token")
        self.bos_token = self._special_tokens.get("bos_token")
        self.pad_token = self._special_tokens.get("pad_token")
        self.unk_token = self._special_tokens.get("unk_token")
        self.eos_token_id: int | None = None if self.eos_token is None else vocab.get(self.eos_token)
        self.tool_template: str | None = None  # for requests with tools, where it is another
        templates = source.chat_template if chat_template is None else chat_template
        if isinstance(templates, dict):  # several, by name
            self.tool_template = templates.get("tool_use")
            templates = templates.get("default", self.tool_template)
        self.chat_template = templates
        self.added_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in added_tokens.items()
        }
        self.response_template: dict[str, Any] | None = self._read_response_template()
        self.reserved_variables = RESERVED_VARIABLES | self._special_tokens.keys()
        self._is_given_template = chat_template is not None
        self._template_fault = self._find_template_fault()
        self.takes_system = self._probe_system_messages(ChatTemplate.takes_system)
        self.takes_system_anywhere = self._probe_system_messages(ChatTemplate.takes_system_anywhere)

    def _find_template_fault(self) -> str | None:
        """Render a probe; return what is wrong with the model's chat template, or None, and log it.

        A template that only renders conversations with tools is right for those. Raises ValueError, naming
        the setting, for a template that replaces the model's.
        """
        template = None
        try:
            if self.chat_template is not None:
                template = self._compiled_template
                template.probe()
        except Exception as error:  # also what Python raises when it compiles the generated code
            needs_tools = template is not None and template.needs_tools()
            if self._is_given_template and not needs_tools:
                raise ValueError(
                    f"chat_template: it has a fault{place_of(error)}: {_first_line(error)}"
                ) from error
            fault = self._describe(error)
            chats = "chat without tools" if needs_tools else "chat"
            logger.warning("%s Requests to %s will fail; --chat-template replaces it.", fault, chats)
            return None if needs_tools else fault
        return None

    def _describe(self, error: Exception) -> str:
        """Return what is wrong with the chat template, as a sentence."""
        whose = "given with --chat-template" if self._is_given_template else "of this model"
        return f"The chat template {whose} has a fault{place_of(error)}: {_first_line(error).rstrip('.')}."

    def _probe_system_messages(self, probe: Callable[[ChatTemplate], bool]) -> bool:
        """Return what a probe of the chat template finds; True if there is no template."""
        try:
            return self.chat_template is None or probe(self._compiled_template)
        except Exception:  # the template does not compile
            return True

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        assert self.chat_template is not None
        return ChatTemplate(self.chat_template, self._special_tokens)

    @cached_property
    def _compiled_tool_template(self) -> ChatTemplate:
        assert self.tool_template is not None
        return ChatTemplate(self.tool_template, self._special_tokens)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text; control tokens spelled in a text are encoded as such."""
        encodings = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        [text] = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_strs(self, token_ids: list[int]) -> list[str]:
        """Return the vocabulary's spelling of each id; empty for an id with a logit but no token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        max_chars: int,
        rendering: Rendering,
    ) -> list[str]:
        """Return a conversation as the chat template renders it, in pieces for encode_rendered().

        Control tokens in the messages stay text: only those that the template or OwnText has are encoded.
        Raises InvalidRequest when the template refuses, writes more than `max_chars` characters, or the
        rendering has to end, and TemplateFault for an error in the template itself.
        """
        if self.chat_template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        found: set[str] = set()
        try:
            has_tools = self.tool_template is not None and bool((template_kwargs or {}).get("tools"))
            template = self._compiled_tool_template if has_tools else self._compiled_template
            text = template.render(
                self._mark(messages, found),
                self._mark(template_kwargs or {}, found),
                rendering,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                max_chars=3 * max_chars,  # at most two marks are added for a character of a client
            )
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: it may raise any exception for its input
            refusals = (TemplateRefusal, ConversationError, SecurityError)
            is_plain_chat = not isinstance(error, refusals) and is_plain(messages, template_kwargs or {})
            if self._template_fault is not None or is_plain_chat:
                fault = self._template_fault or self._describe(error)
                logger.error("%s", fault)
                raise TemplateFault(fault) from error
            raise InvalidRequest(
                f"The chat template refuses this: {_first_line(error)}", "messages"
            ) from error
        if len(text) > max_chars and (num_chars := len(_unmark(text))) > max_chars:
            raise ContextLengthExceeded(
                f"The chat template makes {num_chars} characters of the messages; "
                f"this model's maximum context length holds at most {max_chars}.",
                "messages",
            )
        return self._split(text) if found else [text]

    def encode_rendered(self, pieces: list[str]) -> list[int]:
        """Return the token ids of a rendered conversation. The template writes BOS, so none is added."""
        return [token_id for ids in self.encode_batch(pieces, add_special_tokens=False) for token_id in ids]

    def _read_response_template(self) -> dict[str, Any] | None:
        """Return the tokenizer's response template, if it has one that transformers can read."""
        template: dict[str, Any] | None = getattr(self._hf, "response_template", None)
        if template is not None:
            try:
                self._hf.get_response_parser(prefix="")
            except Exception as error:  # its patterns may be wrong in any way
                logger.warning("the tokenizer's response template cannot be used: %s", _first_line(error))
                return None
        return template

    def response_parser(self, prompt: list[int], tools: list[dict[str, Any]] | None) -> Callable[[], Any]:
        """Return a function that makes transformers' parsers of answers to `prompt`.

        A parser has feed(), finalize() and initial_events().
        """
        prefix = self.decode(prompt, skip_special_tokens=False)
        return lambda: self._hf.get_response_parser(prefix=prefix, tools=tools)

    def _mark(self, value: Any, found: set[str]) -> Any:
        """Enclose every control token in the strings of `value` in marks, and add the token to `found`."""

        def mark(match: re.Match[str]) -> str:
            found.add(match[0])
            return START + match[0] + END

        if isinstance(value, OwnText):
            return value
        if isinstance(value, TextParts):
            return "".join(self._mark(part, found) for part in value)
        if isinstance(value, str):
            return self._control_tokens.sub(mark, _unmark(value))
        if isinstance(value, dict):
            return {self._mark(key, found): self._mark(item, found) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, found) for item in value]
        return value

    def _split(self, text: str) -> list[str]:
        """Split a rendered chat inside every marked control token, so that neither part is the token."""
        # Templates that print a mapping as Python or as ASCII JSON escape the marks.
        text = ESCAPED_START.sub(START, ESCAPED_END.sub(END, text))
        text = self._marked_tokens.sub(lambda match: match[1][:1] + BREAK + match[1][1:], text)
        # A single mark is left where the template cut its string: it also splits the text.
        return text.replace(START, BREAK).replace(END, BREAK).split(BREAK)


def _unmark(text: str) -> str:
    """Remove marks that a user wrote, so that none can be forged."""
    return text.replace(START, "").replace(END, "").replace(BREAK, "")


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:300]
