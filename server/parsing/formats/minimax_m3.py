"""MiniMax M3: an element for each argument, and in it for each value of an object or a list.

The control token `]<]minimax[>[` comes before every tag: ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>….
The items of a list are elements `item`. https://huggingface.co/MiniMaxAI
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.control_tokens import strip, until
from server.parsing.argument_types import Schema, argument_schemas, resolve, types_of
from server.parsing.parser import Marker, Tools
from server.parsing.tagged_call import UNMARKED, TaggedToolParser, Tags, Value

NAMESPACE = "]<]minimax[>["
TAG = r"<(/?)([^<>\n]+)>"
TAG_NAME = until(r"<>\n")
ITEM = "item"
EMPTY = {frozenset(("array",)): "[]", frozenset(("object",)): "{}"}
# Far more than the name of an argument needs: a longer tag is text.
MAX_TAG_CHARS = 512
# An element that is nested deeper is text: a model may open any number of them.
MAX_DEPTH = 64


@dataclass(slots=True)
class Element:
    """An open element: its text, or the names and the JSON of the elements in it."""

    name: str
    schema: Any
    texts: list[str] = field(default_factory=list)
    inner: list[tuple[str, str]] = field(default_factory=list)


class MiniMaxM3Parser(TaggedToolParser):
    """Tags named after the arguments."""

    name = "minimax_m3"
    template_signs = (NAMESPACE,)
    markers = (NAMESPACE,)
    blocks = {f"{NAMESPACE}<tool_call>": f"{NAMESPACE}</tool_call>"}  # noqa: RUF012
    tags = Tags(
        function=f'{NAMESPACE}<invoke name="',
        after_name='">',
        end_function=f"{NAMESPACE}</invoke>",
        parameter=f"{NAMESPACE}<",
        after_key="",
        value=">",
        end_value="",
    )

    @classmethod
    def call_rules(cls, tokens: Mapping[str, int]) -> None:
        """See ToolParser; there is no grammar of text that ends in a tag with a control token before it."""

    def __init__(self, tools: Tools, marker: Marker) -> None:
        super().__init__(tools, marker)
        self._namespace = marker(NAMESPACE)
        self._tag = re.compile(re.escape(self._namespace) + TAG)
        self._elements: list[Element] = []

    @property
    def _schema(self) -> Schema:
        return self.tools.parameters.get(self._name, {})

    def _parameter(self) -> bool:
        """Skip to the next tag, of an argument or of the end; another control token ends the call, too."""
        _, end = self._next_namespace()
        self._at = UNMARKED.match(self._text, self._at, end).end()  # type: ignore[union-attr]
        if self._at < end:
            self._close_call()
            self._state = self._between
            return True
        is_tag = self._accept(self._tags.parameter)
        if is_tag:
            self._state = self._after_bracket
        elif is_tag is not None:
            self._at += len(self._namespace)
        return is_tag is not None

    def _after_bracket(self) -> bool:
        """Read the name of a tag, and its end."""
        name = self._word(TAG_NAME)
        if name is None:
            return False
        self._state = self._parameter
        if self._text[self._at] != ">":
            return True
        self._at += 1
        if name in ("/invoke", "/tool_call"):
            self._close_call()
            self._state = self._between if name == "/invoke" else self._content
        elif name and not name.startswith("/"):
            self._key_name = name
            self._tags = self._tags._replace(end_value=f"{self._namespace}</{name}>")
            self._state = self._first_of_value
        return True

    def _first_of_value(self) -> bool:
        """Decide if the value is empty, text, or elements."""
        is_empty = self._accept(self._tags.end_value)
        if is_empty is None:
            return False
        if not is_empty and not self._text.startswith(self._namespace, self._at):
            self._begin_value()
            return True
        self.argument(self._key_name)
        self._elements = [Element(self._key_name, argument_schemas(self._schema).get(self._key_name))]
        self._state = self._in_elements
        if is_empty:
            self._close_elements()
            self._state = self._parameter
        return True

    def _in_elements(self) -> bool:
        """Read text and the next tag; the JSON of the argument is emitted at its end."""
        found = self._tag.search(self._text, self._at)
        start, end = self._next_namespace()
        is_text = found is None or found.start() > start
        if is_text and 0 <= start < len(self._text) - MAX_TAG_CHARS:
            end = start + len(self._namespace)
        self._elements[-1].texts.append(self._text[self._at : end])
        self._at = end
        if is_text:
            return start >= 0 and end > start
        assert found is not None
        self._at = found.end()
        name = found[2]
        if not found[1]:
            self._open(name, found[0])
        elif any(element.name == name for element in self._elements):
            while self._close_element() != name:
                pass
        elif name in ("invoke", "tool_call"):
            self._close_elements()
            self._at = found.start()
        if not self._elements:
            self._state = self._parameter
        return True

    def _next_namespace(self) -> tuple[int, int]:
        """Return the offset of the next namespace, -1 for none, and that of the end of the text before it."""
        start = self._text.find(self._namespace, self._at)
        return start, start if start >= 0 else len(self._text) - self._num_held((self._namespace,))

    def _open(self, name: str, tag: str) -> None:
        if len(self._elements) == MAX_DEPTH:
            self._elements[-1].texts.append(tag)
            return
        around = resolve(self._elements[-1].schema, self._schema)
        schema = None
        if isinstance(around, Mapping):
            is_item = name == ITEM and "items" in around
            schema = around["items"] if is_item else argument_schemas(around).get(name)
        self._elements.append(Element(name, schema))

    def _close_element(self) -> str:
        """Close the last open element and return its name; the JSON goes to the element around it, if any."""
        element = self._elements.pop()
        text = self._json(element)
        if self._elements:
            self._elements[-1].inner.append((element.name, text))
        else:
            self.arguments(text)
        return element.name

    def _close_elements(self) -> None:
        while self._elements:
            self._close_element()

    def _json(self, element: Element) -> str:
        types = types_of(element.schema, self._schema)
        if not element.inner:
            text = strip("".join(element.texts))
            if not text.strip() and types in EMPTY:
                return EMPTY[types]
            value = Value(types, has_newlines=False)
            return value.feed(text) + value.close()
        if "object" not in types and all(name == ITEM for name, _ in element.inner):
            return f"[{', '.join(text for _, text in element.inner)}]"
        pairs = {json.dumps(strip(name), ensure_ascii=False): text for name, text in element.inner}
        return f"{{{', '.join(f'{name}: {text}' for name, text in pairs.items())}}}"

    def _close_call(self) -> None:
        self._close_elements()
        super()._close_call()
