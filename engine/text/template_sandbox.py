"""The sandbox that chat templates run in: transformers' environment, with limits on time and size.

A template is the operator's choice, but what it does depends on the messages and variables of a client. So a
rendering stops at its deadline, which is checked in every loop iteration, call and piece of output. Operators
that can make a huge value of small ones are bounded, since a single one of them cannot be stopped.
"""

import json
import threading
import time
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import ContextLengthExceeded, InvalidRequest

# Of a string or list that an operator makes, far beyond any prompt; and of an integer, in bits.
MAX_VALUE_SIZE = 100_000_000
MAX_INT_BITS = 65_536


class TemplateRefusal(jinja2.TemplateError):
    """A template has called raise_exception(): it has no rendering for this conversation."""


class Rendering:
    """Ends one rendering at its deadline, or when it is cancelled. cancel() may be called on any thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = float("inf")
        self._is_cancelled = False

    def begin(self) -> None:
        """Start the clock: time in a queue does not count."""
        self._deadline = time.monotonic() + self._seconds

    def cancel(self) -> None:
        """End the rendering at its next check."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raise InvalidRequest if the rendering has to end."""
        if self._is_cancelled:
            raise InvalidRequest("The request was aborted.")
        if time.monotonic() >= self._deadline:
            raise InvalidRequest(f"The chat template took longer than {self._seconds:g} s.", "messages")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders templates under the limits of a Rendering. Safe to use from several threads."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._running = threading.local()
        self.filters["tojson"] = _tojson
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def template(self, source: str) -> jinja2.Template:
        """Compile a template whose loops check the rendering's limits. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            checkpoint = nodes.EnvironmentAttribute("checkpoint")
            loop.body.insert(0, nodes.ExprStmt(checkpoint, lineno=loop.lineno))
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def render(
        self, template: jinja2.Template, variables: dict[str, Any], rendering: Rendering, max_chars: int
    ) -> str:
        """Return the output of a template. Raises ContextLengthExceeded beyond `max_chars` characters.

        Raises InvalidRequest at the rendering's limits, and whatever the template raises.
        """
        pieces: list[str] = []
        num_chars = 0
        rendering.begin()
        self._running.rendering = rendering
        try:
            for piece in template.generate(variables):
                rendering.check()
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise ContextLengthExceeded(
                        f"The chat template makes more than {max_chars} characters of the messages, "
                        "which exceeds this model's maximum context length.",
                        "messages",
                    )
                pieces.append(piece)
        finally:
            del self._running.rendering
        return "".join(pieces)

    @property
    def checkpoint(self) -> None:
        """Check the limits of the rendering on this thread.

        A property, since loops of compiled templates read it: a sandboxed call costs three times as much.
        """
        self._running.rendering.check()

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object from a template, if that is safe and there is time left."""
        self._running.rendering.check()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless its result would be too large."""
        if operator == "*":
            if max(_size(left) * _count(right), _size(right) * _count(left)) > MAX_VALUE_SIZE:
                raise SecurityError("a repetition is too large")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


class _Generation(Extension):
    """The tag `{% generation %}`, which marks model outputs for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` in templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in templates, without attributes that Python may give a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]  # so that `self` may be the name of an attribute
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace must not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_refuse,
    )


def _refuse(value: Any) -> None:
    """Raise UndefinedError with the variable's name for an undefined value, TypeError for any other."""
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    raise TypeError(f"tojson was given a {type(value).__name__}, which is not a JSON value")
