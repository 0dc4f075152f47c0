"""Lines for the person at the terminal: on stderr, since results go to standard output."""

import sys

USAGE = 2  # exit code of argparse for wrong arguments; a wrong setting is one of those


def print_status(text: str) -> None:
    """Print a line about what the command is doing."""
    sys.stderr.write(f"monoloop: {text}\n")
    sys.stderr.flush()


def fail(message: str, code: int) -> int:
    """Print what is wrong, one error per line, and return the exit code."""
    for line in message.splitlines():
        print_status(f"error: {line}")
    return code


def megabytes(num_bytes: int) -> str:
    """Return a size as people read it: `1,234 MB`."""
    return f"{num_bytes / 1e6:,.0f} MB"
