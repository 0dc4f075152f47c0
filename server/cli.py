"""The command `monoloop`: one function per subcommand. Nothing heavy is imported before it is needed."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from server.flags import SettingsError, add_flags, explain, flag, given_flags
from server.version import VERSION

Config = TypeVar("Config", bound=BaseModel)

USAGE = 2  # exit code of argparse for wrong arguments; a wrong setting is one of those


def serve(arguments: list[str]) -> int:
    """serve a model over the OpenAI API"""
    from server import lifecycle, settings

    found = settings.parse(arguments)
    refuse_foreign_kernels()
    return lifecycle.run(found)


def chat(arguments: list[str]) -> int:
    """talk to a model in the terminal"""
    from server.chat import ChatSettings, run

    return run(parse(arguments, "chat", ChatSettings))


def bench(arguments: list[str]) -> int:
    """measure a running server with many streams; bench static, bench kernel: the device alone"""
    if arguments[:1] == ["static"]:
        from server.bench.device import StaticSettings, static

        return static(parse(arguments[1:], "bench static", StaticSettings))
    if arguments[:1] == ["kernel"]:
        from server.bench.device import KernelSettings, kernel

        return kernel(parse(arguments[1:], "bench kernel", KernelSettings))
    from server.bench.command import run
    from server.bench.settings import BenchSettings

    return run(parse(arguments, "bench", BenchSettings))


def pull(arguments: list[str]) -> int:
    """fetch a model without serving it"""
    parser = argparse.ArgumentParser(prog="monoloop pull", description="Fetch a model without serving it.")
    parser.add_argument("model", help="catalog name or hub id")
    parser.add_argument("--cache-dir", type=Path, help="folder for fetched models")
    given = parser.parse_args(arguments)
    from engine import pull as fetch
    from engine.errors import FetchFailed, ModelError

    try:
        weights = asyncio.run(fetch(given.model, given.cache_dir))
    except FetchFailed as error:
        return fail(str(error), 1)
    except ModelError as error:
        return fail(str(error), USAGE)
    sys.stdout.write(f"{weights}\n")
    return 0


def replay(arguments: list[str]) -> int:
    """run the steps of a record again (serve --record FILE): 0 if all tokens are equal, 1 if not"""
    parser = argparse.ArgumentParser(prog="monoloop replay", description="Run the steps of a record again.")
    parser.add_argument("record", type=Path, help="file that `monoloop serve --record` has written")
    parser.add_argument("--model", help="the recorded model, if it lies elsewhere on this machine")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: that of the record")
    parser.add_argument("--cache-dir", type=Path, help="folder for fetched models")
    given = parser.parse_args(arguments)
    from engine import replay as run
    from engine.errors import FetchFailed, ModelError

    try:
        found = run(
            given.record,
            model=given.model,
            device=given.device,
            cache_dir=given.cache_dir,
            on_progress=say,
        )
    except FetchFailed as error:
        return fail(str(error), 1)
    except (ModelError, ValueError) as error:
        return fail(str(error), USAGE)
    if found.ending is not None:
        say(f"the record is not whole: {found.ending}")
    what = f"{found.num_steps:,} steps, {found.num_tokens:,} tokens of {found.num_sequences:,} requests"
    if not found.num_steps:
        return fail("there is no step to compare in it", 1)
    if found.first is None:
        sys.stdout.write(f"equal: {what}\n")
        return 0
    first = found.first
    sys.stdout.write(
        f"different: {found.num_different:,} of {found.num_sequences:,} requests, in {what}\n"
        f"first in step {first.step_id}: output token {first.token_index} of request {first.request_id} is "
        f"{list(first.computed)}, recorded was {list(first.recorded)}\n"
    )
    return 1


def timeline(arguments: list[str]) -> int:
    """draw a record (serve --record FILE) as a timeline that Perfetto opens"""
    parser = argparse.ArgumentParser(
        prog="monoloop timeline", description="Convert a record to Chrome's trace format (ui.perfetto.dev)."
    )
    parser.add_argument("record", type=Path, help="file that `monoloop serve --record` has written")
    parser.add_argument("target", type=Path, help="file to write, such as timeline.json")
    given = parser.parse_args(arguments)
    from engine import write_timeline

    try:
        ending = write_timeline(given.record, given.target)
    except ValueError as error:
        return fail(str(error), USAGE)
    if ending is not None:
        say(f"the record is not whole: {ending}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "chat": chat,
    "bench": bench,
    "pull": pull,
    "replay": replay,
    "timeline": timeline,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that is named first; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--version"]:
        sys.stdout.write(f"monoloop {VERSION}\n")
        return 0
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0 if given else USAGE
    command = COMMANDS.get(given[0])
    if command is None:
        return fail(f"there is no command {given[0]!r}; there are {', '.join(COMMANDS)}", USAGE)
    try:
        return command(given[1:])
    except SettingsError as error:
        return fail(str(error), USAGE)
    except KeyboardInterrupt:
        return 130


def overview() -> str:
    """The help of `monoloop` itself."""
    lines = [f"  {name:<10}{function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(
        [
            "usage: monoloop COMMAND [options]",
            "",
            "An OpenAI-compatible LLM inference server in one process.",
            "",
            *lines,
            "",
            "monoloop COMMAND --help shows the options of a command, monoloop --version the version.",
            "",
        ]
    )


def say(text: str) -> None:
    """Something for the person at the terminal; results go to standard output."""
    sys.stderr.write(f"monoloop: {text}\n")


def fail(message: str, code: int) -> int:
    """Say what is wrong, a line each, and hand back the exit code."""
    for line in message.splitlines():
        sys.stderr.write(f"monoloop: error: {line}\n")
    return code


def parse(arguments: list[str], command: str, model: type[Config]) -> Config:
    """Flags of a subcommand as its settings. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog=f"monoloop {command}", description=model.__doc__, allow_abbrev=False
    )
    add_flags(parser, model, "settings")
    given = given_flags(parser.parse_args(arguments), model)
    try:
        return model(**given)
    except ValidationError as error:
        raise explain(error, model, {name: flag(name) for name in given}) from None


def refuse_foreign_kernels() -> None:
    """A package called `kernels` beside ours would be imported in our place. Raises SettingsError."""
    try:
        foreign = distribution("kernels")
    except PackageNotFoundError:
        return
    raise SettingsError(
        f"the package kernels {foreign.version} is installed here and hides monoloop's own kernels folder; "
        "remove it (pip uninstall kernels) or install monoloop into an environment of its own"
    )
