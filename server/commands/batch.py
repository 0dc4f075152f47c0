"""`monoloop batch`: answers a file of requests in OpenAI's batch format, with an engine in this process.

Requests pass through the application of `monoloop serve` without a socket: each is checked and answered as a
server would.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.errors import FetchFailed, ModelError
from server import lifecycle
from server.app import build_app
from server.commands.batch_file import (
    BadLine,
    BatchFileError,
    Job,
    Results,
    check_files,
    numbered_lines,
    read_job,
    shown,
)
from server.commands.serve import refuse_foreign_kernels
from server.flags import SettingsError, parse_arguments
from server.logs import set_up_logging
from server.metrics import Metrics
from server.routes.table import ENDPOINTS
from server.settings import Settings, settings_of, settings_parser
from server.terminal import USAGE, fail, print_status

if TYPE_CHECKING:
    from engine import Engine

FAILED = 1
URLS = {
    path
    for endpoint in ENDPOINTS
    if endpoint.method == "POST"
    for path in endpoint.paths
    if path.startswith("/v1/")
}
# Of the server's settings, those that concern its clients.
NO_KEYS = {
    "api_key": (),
    "key_requests": None,
    "key_requests_per_minute": None,
    "key_tokens_per_minute": None,
}
TOO_MANY = HTTPStatus.TOO_MANY_REQUESTS
RETRIES = 600  # of a request that the engine is too busy for; it says after how many seconds
REFRESHES_PER_SECOND = 2


class EngineStopped(Exception):
    """The engine has died: what it still refuses is to be asked again."""


def main(arguments: list[str]) -> int:
    """Answer the requests of a file; return the exit code. Raises SettingsError."""
    parser = settings_parser(
        "batch",
        "Answer all requests of a file in OpenAI's batch format, without a server: lines with custom_id, "
        "method, url and body. Results are appended to OUT as they come, in any order; requests that have a "
        "result there are skipped, so the same command goes on after an interruption. The exit code is 0 if "
        "all results are answers, 1 if some are errors or the run failed, 130 after Ctrl-C. The settings are "
        "those of serve, of which address, API keys and their limits have no effect.",
    )
    parser.add_argument("input", type=Path, metavar="IN", help="file of requests, such as requests.jsonl")
    parser.add_argument("output", type=Path, metavar="OUT", help="file of results; it may hold earlier ones")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="most requests at a time (default: 2 x max_num_seqs)"
    )
    given = parse_arguments(parser, arguments)
    settings = settings_of(given)
    if given.concurrency is not None and given.concurrency < 1:
        raise SettingsError(f"--concurrency: must be 1 or more (got {given.concurrency})")
    refuse_foreign_kernels()
    # The log's line for each request would be one more for each result.
    level = settings.server.log_level if "log_level" in settings.origins else "warning"
    set_up_logging(level, settings.server.log_format)
    try:
        check_files(given.input, given.output)
        next(numbered_lines(given.input), None)  # a wrong name leaves no file of results
        results = Results(given.output)
    except BatchFileError as error:
        return fail(str(error), USAGE)
    with closing(results):
        try:
            num_jobs = sum(1 for _ in unanswered(given.input, results))
        except BatchFileError as error:
            return fail(str(error), FAILED)
        if not num_jobs:
            return report(results)
        with asyncio.Runner(loop_factory=lifecycle.loop_factory(settings.server)) as runner:
            code = runner.run(Run(settings, given.input, results, num_jobs, given.concurrency).run())
    gc.unfreeze()  # or libraries that count their objects at exit report leaks
    return code


def report(results: Results) -> int:
    """Print what the file of results holds; return the exit code."""
    num_answers = len(results) - results.num_errors
    print_status(f"{num_answers:,} answers and {results.num_errors:,} errors are written")
    return FAILED if results.num_errors else 0


class Run:
    """One run: loads the model, answers what has no result yet, and ends early at a signal or a fault."""

    def __init__(
        self, settings: Settings, source: Path, results: Results, num_jobs: int, concurrency: int | None
    ) -> None:
        self._settings = settings
        self._source = source
        self._results = results
        self._num_jobs = num_jobs
        config = settings.engine
        # As many wait as run, so that one that ends is followed at once.
        self._concurrency = concurrency or config.max_num_seqs + min(config.max_num_seqs, config.max_waiting)
        self._working: asyncio.Future[list[None]] | None = None
        self._signal: int | None = None

    async def run(self) -> int:
        """Answer all requests; return the exit code. Raises SettingsError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        metrics = Metrics()
        try:
            engine = await lifecycle.start_engine(self._settings, metrics, print_status)
        except FetchFailed as error:
            return fail(str(error), FAILED)
        except (ModelError, ValueError) as error:
            raise self._settings.explain(error) from error
        try:
            await self._answer_all(engine, metrics)
        except (BatchFileError, EngineStopped) as error:
            return fail(str(error), FAILED)
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        finally:
            await engine.stop()
        code = report(self._results)
        if self._signal is None:
            return code
        print_status("the same command answers the rest")
        return 128 + self._signal

    def _on_signal(self, number: int) -> None:
        """Stop answering. While the model loads, and at the second signal, end at once."""
        working = self._working
        if working is None or self._signal is not None:
            lifecycle.exit_now(128 + number)
        else:
            self._signal = number
            working.cancel()

    async def _answer_all(self, engine: "Engine", metrics: Metrics) -> None:
        """Answer all requests, several at a time. Raises BatchFileError, EngineStopped, CancelledError."""
        app = build_app(engine, self._settings.server.model_copy(update=NO_KEYS), metrics)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
            with progress_bar(engine, self._num_jobs) as advance:
                jobs = unanswered(self._source, self._results)
                workers = [
                    asyncio.create_task(self._answer_each(jobs, engine, client, advance))
                    for _ in range(min(self._concurrency, self._num_jobs))
                ]
                self._working = asyncio.gather(*workers)
                try:
                    await self._working
                finally:
                    for worker in workers:
                        worker.cancel()
                    await asyncio.gather(*workers, return_exceptions=True)

    async def _answer_each(
        self, jobs: Iterator[Job], engine: "Engine", client: httpx.AsyncClient, advance: Callable[[], None]
    ) -> None:
        """Answer one request after the other, of those that all workers share."""
        for job in jobs:
            response = await self._answer(job, client)
            if not engine.is_alive:
                raise EngineStopped("the engine has stopped after a fault; the same command answers the rest")
            request_id = response.headers["x-request-id"]
            self._results.add_response(job, response.status_code, request_id, response.content)
            advance()

    async def _answer(self, job: Job, client: httpx.AsyncClient) -> httpx.Response:
        """Return the response to a request, asked again as long as the engine has no room for it."""
        headers = {"content-type": "application/json"}
        for _ in range(RETRIES):
            response = await client.post(job.url, content=job.body, headers=headers)
            if response.status_code != TOO_MANY:
                break
            await asyncio.sleep(float(response.headers.get("retry-after", 1)))
        return response


def unanswered(source: Path, results: Results) -> Iterator[Job]:
    """Yield the requests without a result; write an error for each line that is none, or repeats an id.

    Raises BatchFileError.
    """
    seen: set[str] = set()
    for number, line in numbered_lines(source):
        try:
            job = read_job(line, URLS)
            if job.custom_id in seen:
                raise BadLine(f"custom_id {shown(job.custom_id)} is that of an earlier line, too")
            seen.add(job.custom_id)
            if not results.has(number, job.custom_id):
                yield job
        except BadLine as error:
            if not results.has(number, error.custom_id):
                results.add_error(number, error.custom_id, str(error))


@contextmanager
def progress_bar(engine: "Engine", total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while inside, if stderr is a terminal; each call of what is returned counts one."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    began, num_before = time.monotonic(), engine.stats().generation_tokens_total
    with Progress(
        *columns, console=console, refresh_per_second=REFRESHES_PER_SECOND, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=total)

        def advance() -> None:
            num_tokens = engine.stats().generation_tokens_total - num_before
            rate = num_tokens / (time.monotonic() - began + 1e-9)
            progress.update(bar, advance=1, description=f"{rate:,.0f} output tokens/s")

        yield advance
