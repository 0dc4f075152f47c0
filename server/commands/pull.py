"""`monoloop pull`: fetches a model without serving it."""

import argparse
import asyncio
import sys

import engine
from engine.errors import FetchFailed, ModelError
from server.flags import parse_arguments
from server.settings import add_cache_flags, find_cache_dir
from server.terminal import USAGE, fail


def main(arguments: list[str]) -> int:
    """Fetch the named model and print its folder; return the exit code. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog="monoloop pull", description="Fetch a model without serving it.")
    parser.add_argument("model", help="catalog name, hub id, or OWNER/NAME:Q4_K_M for one GGUF model")
    add_cache_flags(parser)
    given = parse_arguments(parser, arguments)
    cache_dir = find_cache_dir(given)
    try:
        weights = asyncio.run(engine.pull(given.model, cache_dir))
    except FetchFailed as error:
        return fail(str(error), 1)
    except ModelError as error:
        return fail(str(error), USAGE)
    sys.stdout.write(f"{weights}\n")
    return 0
