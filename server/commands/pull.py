"""`monoloop pull`: fetches a model without serving it."""

import argparse
import asyncio
import sys
from pathlib import Path

import engine
from engine.errors import FetchFailed, ModelError
from server.flags import parse_arguments
from server.terminal import USAGE, fail


def main(arguments: list[str]) -> int:
    """Fetch the named model and print its folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="monoloop pull", description="Fetch a model without serving it.")
    parser.add_argument("model", help="catalog name or hub id")
    parser.add_argument("--cache-dir", type=Path, help="folder for fetched models")
    given = parse_arguments(parser, arguments)
    try:
        weights = asyncio.run(engine.pull(given.model, given.cache_dir))
    except FetchFailed as error:
        return fail(str(error), 1)
    except ModelError as error:
        return fail(str(error), USAGE)
    sys.stdout.write(f"{weights}\n")
    return 0
