"""Chat templates: one from a file in place of the model's own, and what no client may set for either."""

import inspect
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.defaults import DEFAULT_NAMESPACE

# What a conversation is called in templates, and the functions that transformers gives them.
GIVEN = frozenset(("messages", "raise_exception", "strftime_now"))
# Parameters of the calls below that are data, like any other variable.
DATA = frozenset(("tools", "documents"))


def read_template(path: Path) -> str:
    """The Jinja source in a file. Raises ValueError, naming the setting, where it holds none."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds to import

    try:
        source = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"chat_template: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"chat_template: {path} is not text in UTF-8") from None
    if not source.strip():
        raise ValueError(f"chat_template: {path} is empty")
    try:
        render_jinja_template(conversations=[], chat_template=source)  # compiles it, with nothing to render
    except TemplateSyntaxError as error:
        raise ValueError(
            f"chat_template: {path} has an error in line {error.lineno}: {error.message}"
        ) from None
    except Exception as error:  # what Python says of the code made of it, such as too deep a nesting
        raise ValueError(f"chat_template: {path} does not compile: {error}") from None
    return source


def reserved_variables(tokenizer: Any) -> frozenset[str]:
    """Variables that decide how transformers' `tokenizer` renders a chat, or that a template has already."""
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {*GIVEN, *DEFAULT_NAMESPACE, *tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    for call in (type(tokenizer).apply_chat_template, render_jinja_template):
        names |= inspect.signature(call).parameters.keys()
    return frozenset(names - DATA)
