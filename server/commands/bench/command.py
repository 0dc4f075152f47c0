"""The command itself: settings in, a table out."""

import asyncio
import json
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.commands.bench.client import Client, Result
from server.commands.bench.load import Run, drive
from server.commands.bench.plot import plot
from server.commands.bench.report import make_report, table, to_json
from server.commands.bench.scrape import ServerInfo
from server.commands.bench.settings import BenchSettings
from server.commands.bench.workload import Job, jobs, read_lengths
from server.flags import SettingsError

# Above this a latency in the table says as much of the client as of the server.
NOTABLE_CLIENT_LAG_SECONDS = 0.010


def run(settings: BenchSettings) -> int:
    """Drive the server, print the table, write the files. Returns the exit status: 1 if a request failed.

    Raises SettingsError, before the first request, for a file that cannot be written.
    """
    check_writable(settings.json_file, "--json")
    check_writable(settings.plot, "--plot")
    console = Console()
    try:
        client = Client(settings.url, settings.api_key, settings.timeout_seconds)
        server = ServerInfo(settings)
        model = settings.model or server.first_model()
        work = jobs(_lengths(settings), model, settings.seed, settings.rate, settings.arrivals)
    except ValueError as error:
        Console(stderr=True).print(f"[red]bench:[/] {error}", highlight=False)
        return 1
    pace = (
        f"{settings.rate:g} requests/s ({settings.arrivals})"
        if settings.rate
        else f"{settings.concurrency} streams"
    )
    title = f"{model} at {settings.url}: {len(work)} requests, {pace}"
    before = server.snapshot()
    try:
        outcome = asyncio.run(_drive(client, work, None if settings.rate else settings.concurrency, console))
    except KeyboardInterrupt:
        console.print("interrupted; nothing is reported", style="yellow")
        return 130
    report = make_report(outcome, before, server.snapshot())
    console.print(title, markup=False, highlight=False)
    console.print(table(report))
    for message, count in report.error_messages.items():
        console.print(f"{count} × {message}", style="red", markup=False, highlight=False)
    if report.client_lag_p99_seconds > NOTABLE_CLIENT_LAG_SECONDS:
        console.print(
            f"This client was up to {report.client_lag_p99_seconds * 1e3:.0f} ms late itself (p99): "
            "the latencies above contain that. Run it where there are idle cores.",
            style="yellow",
        )
    try:
        if settings.json_file is not None:
            document = to_json(report, settings.model_dump(mode="json", exclude={"api_key"}))
            settings.json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if settings.plot is not None:
            plot(outcome, title, settings.plot)
    except OSError as error:  # a disk that is full by now
        Console(stderr=True).print(f"[red]bench:[/] {error}", highlight=False)
        return 1
    return 1 if report.errors else 0


def check_writable(path: Path | None, flag: str) -> None:
    """A file that cannot be written is to be known before the run, not after it. Raises SettingsError."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise SettingsError(f"{flag} {path}: is a folder, not a file")
        if not path.parent.is_dir():
            raise SettingsError(f"{flag} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise SettingsError(f"{flag} {path}: cannot be written")
    except OSError as error:  # such as a name that is too long
        raise SettingsError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def _lengths(settings: BenchSettings) -> list[tuple[int, int]]:
    if settings.workload is not None:
        return read_lengths(settings.workload)[: settings.requests]
    return [(settings.prompt_tokens, settings.output_tokens)] * (settings.requests or 64)


async def _drive(client: Client, work: list[Job], concurrency: int | None, console: Console) -> Run:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("requests", total=len(work))

        def on_result(result: Result) -> None:
            progress.advance(task)

        return await drive(client, work, concurrency, on_result)
