"""What the hot path costs now and at another commit: `benchmarks.loop` in two checkouts, interleaved.

    python -m benchmarks.hot_path --base COMMIT [--rounds 5] [-- --streams 64]

Flags after `--` go to `benchmarks.loop`. The time that the server's process spends on a processor, per token,
is the figure to trust on a shared machine: tokens per second also say what else ran.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.common import parser, show

ROOT = Path(__file__).parents[1]
LOOP_FLAGS = ["--step-milliseconds", "0.1", "--streams", "16", "--output-tokens", "256"]
CPU = "CPU µs/token"
METRICS = (CPU, "tokens/s", "lag p50 ms")


def main() -> None:
    """Measure both sides in turn, print medians and the median of the pairs' ratios."""
    flags = parser(__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--base", required=True, help="the commit to compare with")
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what this starts in a checkout
    flags.add_argument("loop_flags", nargs="*", metavar="FLAG", help="a flag of benchmarks.loop, after --")
    args = flags.parse_args()
    loop_flags = [*LOOP_FLAGS, *args.loop_flags]
    if args.measure is not None:
        measure(args.measure, args.loop_flags)
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        check_out(args.base, base)
        child_flags = ["--base", args.base, "--", *loop_flags]
        rounds = [
            [run(side, Path(folder), child_flags, Path(__file__)) for side in (base, ROOT)]
            for _ in range(args.rounds)
        ]
    rows = [compare(name, [(old[name], new[name]) for old, new in rounds]) for name in METRICS]
    show(f"now against {args.base}, {args.rounds} rounds", rows, args.json)


def check_out(commit: str, folder: Path) -> None:
    """Write the files of a commit into a folder."""
    done = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")


def run(checkout: Path, folder: Path, flags: list[str], script: Path) -> dict[str, Any]:
    """One run of a script with a checkout's code, in a process of its own; it gets --measure REPORT."""
    report = folder / "report.json"
    # -P: the first place to import from is the checkout, not the folder of the script.
    command = [sys.executable, "-P", str(script), "--measure", str(report), *flags]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script.name} in {checkout} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def measure(report: Path, loop_flags: list[str]) -> None:
    """Run the benchmark that is there, and note what its last drive took on the processor."""
    from benchmarks import loop

    drive, per_token = loop.drive, 0.0

    async def timed_drive(*args: Any) -> dict[str, Any]:
        nonlocal per_token
        start = time.process_time()  # of this process alone: the client runs in another
        found: dict[str, Any] = await drive(*args)
        per_token = 1e6 * (time.process_time() - start) / found["output_tokens"]
        return found

    loop.drive = timed_drive
    sys.argv = ["loop", "--json", str(report), *loop_flags]
    loop.main()
    row = json.loads(report.read_text())["rows"][-1]
    report.write_text(json.dumps({**row, CPU: per_token}))


def compare(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians, and the median and range of the ratios."""
    ratios = sorted(new / old for old, new in pairs)
    return {
        "what": name,
        "base": statistics.median(old for old, _ in pairs),
        "now": statistics.median(new for _, new in pairs),
        "now / base": statistics.median(ratios),
        "from": ratios[0],
        "to": ratios[-1],
    }


if __name__ == "__main__":
    main()
