"""`monoloop rm`: removes a model from the cache."""

import argparse

import engine
from server.flags import did_you_mean, parse_arguments
from server.settings import add_cache_flags, find_cache_dir
from server.terminal import USAGE, fail, megabytes, print_status


def main(arguments: list[str]) -> int:
    """Delete the files of the named model; return the exit code. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog="monoloop rm",
        description="Remove a fetched model from the cache. That of the hub is shared with other programs.",
    )
    parser.add_argument(
        "model",
        help="catalog name or hub id, as `monoloop list` shows it, or OWNER/NAME:Q4_K_M for one GGUF model",
    )
    add_cache_flags(parser)
    given = parse_arguments(parser, arguments)
    cache_dir = find_cache_dir(given)
    try:
        removed = engine.remove_model(given.model, cache_dir)
    except OSError as error:
        return fail(f"{given.model} could not be removed: {error}", 1)
    if removed is None:
        names = [model.name for model in engine.cached_models(cache_dir)]
        return fail(f"there is no {given.model} in the cache{did_you_mean(given.model, names)}", USAGE)
    print_status(f"removed {removed.name}: {megabytes(removed.size_bytes)} in {removed.folder}")
    return 0
