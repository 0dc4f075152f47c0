"""Progress bars of bytes, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def byte_progress(what: str, total: int, *, shown: bool, stays: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar with bytes, rate and time left; yields a function that takes the bytes done so far.

    `stays`: the bar is left when it ends, and printed then if there is no terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = not shown or not (stays or console.is_terminal)
    with Progress(*columns, console=console, disable=hidden, transient=not stays) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
