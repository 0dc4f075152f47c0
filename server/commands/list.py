"""`monoloop list`: prints the models in the cache."""

import argparse
import sys
from pathlib import Path

import engine
from server.flags import parse_arguments
from server.terminal import megabytes


def main(arguments: list[str]) -> int:
    """Print name, size and folder of each fetched model; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="monoloop list",
        description="List the fetched models with size and folder. Models of the Hugging Face hub are in its "
        "own cache, which other programs share, unless --cache-dir is given.",
    )
    parser.add_argument("--cache-dir", type=Path, help="folder for fetched models")
    given = parse_arguments(parser, arguments)
    models = engine.cached_models(given.cache_dir)
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        sys.stdout.write(f"{model.name:<{width}}  {megabytes(model.size_bytes):>10}  {model.folder}\n")
    return 0
