"""`monoloop replay`: runs the steps of a record again and compares the tokens."""

import argparse
import sys
from pathlib import Path

import engine
from engine.errors import FetchFailed, ModelError
from server.flags import parse_arguments
from server.settings import add_cache_flags, find_cache_dir
from server.terminal import USAGE, fail, print_status


def main(arguments: list[str]) -> int:
    """Replay a record; return 0 if all tokens are equal, 1 if not. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog="monoloop replay", description="Run the steps of a record again.")
    parser.add_argument("record", type=Path, help="file that `monoloop serve --record` has written")
    parser.add_argument("--model", help="the recorded model, if it lies elsewhere on this machine")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: that of the record")
    add_cache_flags(parser)
    given = parse_arguments(parser, arguments)
    cache_dir = find_cache_dir(given)
    try:
        found = engine.replay(
            given.record,
            model=given.model,
            device=given.device,
            cache_dir=cache_dir,
            on_progress=print_status,
        )
    except FetchFailed as error:
        return fail(str(error), 1)
    except (ModelError, ValueError) as error:
        return fail(str(error), USAGE)
    if found.ending is not None:
        print_status(f"the record is not whole: {found.ending}")
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
