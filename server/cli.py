"""The command `monoloop`: finds the subcommand. Nothing heavy is imported before it is needed."""

import os
import sys
from importlib import import_module

from server.flags import SettingsError, did_you_mean
from server.proxies import no_proxy_for_loopback
from server.terminal import USAGE, fail, set_up_streams
from server.version import VERSION

# Each is a module of server.commands with a function main(arguments) that returns the exit code.
COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "chat": "talk to a model in the terminal",
    "batch": "answer a file of requests in OpenAI's batch format, without a server",
    "bench": "measure a running server with many streams; bench static, bench kernel: the device alone",
    "pull": "fetch a model without serving it",
    "models": "list the architectures that run; models MODEL: say if a model runs on this machine",
    "config": "print the settings of serve, and where each came from",
    "doctor": "check machine, settings and model before a start: 0 if serve can run, 1 if not",
    "list": "list the models in the cache",
    "rm": "remove a model from the cache",
    "replay": "run the steps of a record again (serve --record FILE): 0 if all tokens are equal, 1 if not",
    "timeline": "draw a record (serve --record FILE) as a timeline that Perfetto opens",
}

BROKEN_PIPE = 128 + 13  # what a shell reports of a program that SIGPIPE ended


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand that is named first; return the exit code."""
    set_up_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # a help, too, which ends the program by itself
    except BrokenPipeError:  # whoever read the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return BROKEN_PIPE


def _run(arguments: list[str] | None) -> int:
    if sys.platform == "win32":
        return fail("Windows is not supported: run monoloop in WSL 2 or in a container", USAGE)
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--version"]:
        sys.stdout.write(f"monoloop {VERSION}\n")
        return 0
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0 if given else USAGE
    if given[0] not in COMMANDS:
        hint = did_you_mean(given[0], COMMANDS)
        return fail(f"there is no command {given[0]!r}; there are {', '.join(COMMANDS)}{hint}", USAGE)
    no_proxy_for_loopback(os.environ)
    try:
        code: int = import_module(f"server.commands.{given[0]}").main(given[1:])
    except SettingsError as error:
        return fail(str(error), USAGE)
    except KeyboardInterrupt:
        return 130
    return code


def overview() -> str:
    """Return the help of `monoloop` itself."""
    lines = [f"  {name:<10}{summary}" for name, summary in COMMANDS.items()]
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
