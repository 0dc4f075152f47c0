"""`monoloop doctor`: checks machine, settings and model before a start, and says what to do."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator

import engine
from engine.config import EngineConfig
from engine.errors import FetchFailed, ModelError, NotFetched
from engine.machine_check import Finding
from server.checks import check_config
from server.commands.serve import refuse_foreign_kernels
from server.config import ServerConfig
from server.file_limit import file_limit, raise_file_limit
from server.flags import SettingsError, parse_arguments
from server.lifecycle import loop_factory, open_traces
from server.listener import certificate_problem, listen, remove, tls_context
from server.logs import set_up_logging
from server.settings import Settings, add_positional_model, settings_of, settings_parser
from server.terminal import printable

FEW_FILES = 4096
# The libraries that fetch models must not reach for the network to complete what is in the cache.
OFFLINE = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"}


def main(arguments: list[str]) -> int:
    """Print a line for each finding; return 1 if one is a problem, else 0."""
    parser = settings_parser(
        "doctor",
        "Check what serve needs, given the same flags, environment and file: libraries, GPU, compiled "
        "kernels, memory, cores, folders, port, open files, and the model if it is on this machine. Nothing "
        "is loaded or fetched. The exit code is 1 if there is a problem, else 0; warnings do not count.",
    )
    given = parse_arguments(add_positional_model(parser), arguments)
    os.environ.update(OFFLINE)
    set_up_logging("error")
    code = 0
    for finding in findings(given):
        code = 1 if finding.level == "problem" else code
        advice = f"; {finding.advice}" if finding.advice else ""
        sys.stdout.write(f"{finding.level:<8} {finding.name:<13} {printable(finding.text + advice)}\n")
        sys.stdout.flush()
    return code


def findings(given: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings. With wrong settings the rest is checked with default ones."""
    try:
        refuse_foreign_kernels()
    except SettingsError as error:
        yield Finding("packages", "problem", str(error))
        return
    try:
        settings = settings_of(given)
    except SettingsError as error:
        settings = Settings(EngineConfig.model_validate({}), ServerConfig.model_validate({}))
        for line in str(error).splitlines():
            yield Finding("settings", "problem", line, "the lines below are about default settings")
    else:
        yield Finding("settings", "ok", f"{len(settings.origins)} given; monoloop config shows all")
    for warning in settings.warnings:
        yield Finding("settings", "warning", warning)
    machine = engine.check_machine(settings.engine)
    yield from machine
    yield from _opened(settings)
    yield from _server(settings)
    if not any(finding.name == "torch" and finding.level == "problem" for finding in machine):
        yield _model(settings)


def _opened(settings: Settings) -> Iterator[Finding]:
    """Yield problems with what serve opens, writes to or sends to beside its port."""
    checks: tuple[Callable[[], object], ...] = (
        lambda: engine.check_listeners(settings.engine),
        lambda: check_config(settings.server),
        lambda: open_traces(settings.server.otlp_endpoint),
    )
    for check in checks:
        try:
            check()
        except SettingsError as error:
            yield Finding("settings", "problem", str(error))
        except ValueError as error:
            yield Finding("settings", "problem", str(settings.explain(error)))


def _server(settings: Settings) -> Iterator[Finding]:
    """Yield findings about port, TLS, open files and event loop."""
    port, path = settings.server.port, settings.server.uds
    try:
        with listen(settings.server) as listener:
            remove(listener)
        yield Finding("port", "ok", f"{path or f'{settings.server.host}:{port}'} is free")
    except SettingsError as error:
        advice = f"give another, or end what listens there (ss -ltnp 'sport = :{port}' shows it)"
        yield Finding("port", "problem", str(error), advice if str(error).startswith("--port") else "")
    try:
        if tls := tls_context(settings.server):
            problem = certificate_problem(tls, settings.server)
            text = problem or f"{settings.server.ssl_certfile} can be used"
            yield Finding("tls", "warning" if problem else "ok", text)
    except SettingsError as error:
        yield Finding("tls", "problem", str(error))
    raise_file_limit()
    if (most := file_limit()) < FEW_FILES:
        advice = "raise it: ulimit -Hn 65536, LimitNOFILE= of systemd, or --ulimit nofile=65536 of docker"
        text = f"at most {most:,}, and every connection is one"
        yield Finding("open files", "warning", text, advice)
    else:
        yield Finding("open files", "ok", f"at most {most:,}")
    if settings.server.uvloop:
        has_uvloop = loop_factory(settings.server) is not None
        text = "installed" if has_uvloop else "not installed; asyncio's own loop is slower"
        advice = "" if has_uvloop else "pip install uvloop"
        yield Finding("uvloop", "ok" if has_uvloop else "warning", text, advice)


def _model(settings: Settings) -> Finding:
    """Return the finding about the model's files: found, complete, and small enough for this machine."""
    name = settings.engine.model
    try:
        found = engine.check_model(settings.engine)
    except NotFetched:
        text = f"{name} is not on this machine; serve fetches it first"
        return Finding("model", "warning", text, f"`monoloop pull {name}` fetches it now")
    except FetchFailed:
        text = f"{name} is in the cache, but not whole"
        return Finding("model", "problem", text, f"`monoloop pull {name}` fetches what is missing")
    except (ModelError, ValueError) as error:
        return Finding("model", "problem", str(settings.explain(error)))
    return Finding(
        "model",
        "ok",
        f"{found.name}: weights of {found.weight_bytes / 1e9:.2f} GB, {found.kv_tokens:,} tokens fit on "
        f"{found.device} ({found.path})",
    )
