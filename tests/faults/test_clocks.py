"""The wall clock may jump: no deadline and no duration is measured by it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.server.conftest import ROOT

WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
# Files that show a date, and what they call.
DATES = {
    "engine/kv_events.py": {"time.time"},  # when events were sent
    "engine/record/writer.py": {"time.time"},  # when a record began
    "engine/startup.py": {"time.time"},  # `created` of a model
    "engine/text/template_sandbox.py": {"datetime.now"},  # strftime_now() of chat templates
    "server/answer.py": {"time.time"},  # `created` of an answer
    "server/tracing.py": {"time.time_ns"},  # when a span began
}


def calls(path: Path) -> Iterator[str]:
    """Return the names `module.function` of the calls in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ".".join(ast.unparse(node.func).split(".")[-2:])


def test_only_dates_come_from_the_wall_clock() -> None:
    found = {
        str(path.relative_to(ROOT)): used
        for folder in ("server", "engine", "models", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (used := WALL_CLOCKS.intersection(calls(path)))
    }
    assert found == DATES, "use time.monotonic or time.perf_counter for durations"
