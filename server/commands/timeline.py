"""`monoloop timeline`: converts a record to Chrome's trace format."""

import argparse
from pathlib import Path

import engine
from server.flags import parse_arguments
from server.terminal import USAGE, fail, print_status


def main(arguments: list[str]) -> int:
    """Write the timeline of a record to a file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="monoloop timeline", description="Convert a record to Chrome's trace format (ui.perfetto.dev)."
    )
    parser.add_argument("record", type=Path, help="file that `monoloop serve --record` has written")
    parser.add_argument("target", type=Path, help="file to write, such as timeline.json")
    given = parse_arguments(parser, arguments)
    try:
        ending = engine.write_timeline(given.record, given.target)
    except ValueError as error:
        return fail(str(error), USAGE)
    if ending is not None:
        print_status(f"the record is not whole: {ending}")
    return 0
