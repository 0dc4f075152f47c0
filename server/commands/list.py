"""`monoloop list`: prints the models in the cache."""

import argparse
import sys

import engine
from server.flags import parse_arguments
from server.settings import add_cache_flags, find_cache_dir
from server.terminal import megabytes


def main(arguments: list[str]) -> int:
    """Print name, size and folder of each fetched model; return the exit code. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog="monoloop list",
        description="List the fetched models with size and folder. Models of the Hugging Face hub are in its "
        "own cache, which other programs share, unless the setting cache_dir names a folder.",
    )
    add_cache_flags(parser)
    given = parse_arguments(parser, arguments)
    cache_dir = find_cache_dir(given)
    models = engine.cached_models(cache_dir)
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        sys.stdout.write(f"{model.name:<{width}}  {megabytes(model.size_bytes):>10}  {model.folder}\n")
    return 0
