"""Templates end at their deadline, when they are cancelled, or at their size, whatever they do."""

import itertools
import threading

import jinja2
import pytest

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.text import template_sandbox
from engine.text.template_sandbox import Rendering, TemplateSandbox

SECONDS = 1000.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances by a second at every look at it."""
    ticks = itertools.count()
    monkeypatch.setattr(template_sandbox.time, "monotonic", lambda: float(next(ticks)))
    return ticks


def render(source: str, *, rendering: Rendering | None = None, max_chars: int = 10_000, **variables) -> str:
    sandbox = TemplateSandbox()
    return sandbox.render(sandbox.template(source), variables, rendering or Rendering(SECONDS), max_chars)


ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over data": "{% for a in xs %}{% for b in xs %}{% set c = a %}{% endfor %}{% endfor %}",
    "a loop that skips its body": "{% for a in xs %}{% for b in xs %}{% continue %}{% endfor %}{% endfor %}",
    "a loop in a macro": "{% macro f() %}{% for a in xs %}{% for b in xs %}x{% endfor %}{% endfor %}"
    "{% endmacro %}{% set y = f() %}",
    "a recursive loop": "{% for a in xs recursive %}{{ loop(xs) if loop.depth < 9 }}{% endfor %}",
    "calls without end": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}"
    "{% endmacro %}{% set y = f(60) %}",
    "output without end": "{% for a in range(99999) %}{% for b in range(99999) %}{{ e }}{% endfor %}"
    "{% endfor %}",
    "a block that is assigned": "{% set y %}{% for a in xs %}{% for b in xs %}x{% endfor %}{% endfor %}"
    "{% endset %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_runs_for_ever_ends_at_the_deadline(clock, source):
    with pytest.raises(InvalidRequest, match=r"took longer than 1000 s") as caught:
        render(source, xs=[0] * 99_999, e="")
    assert caught.value.param == "messages"
    assert next(clock) < 1010, "nothing ran on after the deadline"


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_runs_for_ever_ends_when_it_is_cancelled(source):
    rendering = Rendering(SECONDS)
    errors = []

    def work():
        try:
            render(source, rendering=rendering, xs=[0] * 99_999, e="")
        except InvalidRequest as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    rendering.cancel()
    thread.join(60)
    assert not thread.is_alive() and errors == ["The request was aborted."]


def test_a_rendering_that_was_cancelled_before_it_began_never_runs():
    rendering = Rendering(SECONDS)
    rendering.cancel()
    with pytest.raises(InvalidRequest):
        render("x", rendering=rendering)


def test_time_in_the_queue_does_not_count(clock):
    rendering = Rendering(SECONDS)
    for _ in range(2000):
        next(clock)
    assert render("{% for a in range(9) %}{{ a }}{% endfor %}", rendering=rendering) == "012345678"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * size }}",
        "{{ size * 'x' }}",
        "{{ [0] * size }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ big ** big }}",
    ],
)
def test_no_operator_makes_a_huge_value(source):
    with pytest.raises(jinja2.exceptions.SecurityError, match="too large"):
        render(source, size=10**12, big=10**6)


def test_small_values_are_computed():
    source = "{{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 2.0 ** 0.5 > 1 }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ 3 * 4 }}"
    assert render(source) == "ababab 1024 True ab [1, 2] 12"


def test_output_is_bounded_while_it_is_made():
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ text }}{% endfor %}{% endfor %}"
    with pytest.raises(ContextLengthExceeded, match="more than 50 characters"):
        render(source, text="x" * 10, max_chars=50)
    assert render("{{ text }}", text="x" * 50, max_chars=50) == "x" * 50


def test_a_thread_may_render_again_after_an_error():
    sandbox = TemplateSandbox()
    template = sandbox.template("{% for x in xs %}{{ x + 1 }}{% endfor %}")
    for _ in range(2):
        with pytest.raises(TypeError):
            sandbox.render(template, {"xs": ["a"]}, Rendering(SECONDS), 10)
        assert sandbox.render(template, {"xs": [1]}, Rendering(SECONDS), 10) == "2"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__dict__ = {} %}",
        "{{ (1).__class__.__base__ }}",
        "{{ dict.__mro__[0] }}",
    ],
)
def test_python_internals_are_out_of_reach(source):
    with pytest.raises((jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError)):
        render(source, messages=[])
