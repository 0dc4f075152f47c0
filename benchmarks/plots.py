"""Draws what benchmarks.simulate found: a row of bars for each trace."""

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
NAIVE = ("admit all", "reserve max_tokens")
# Titles, and columns of the rows; where there are two, the second is drawn pale behind the first.
PANELS = (
    ("output tokens/s", ("tokens/s",)),
    ("goodput, requests/s", ("goodput/s",)),
    ("TTFT p50 and p99, s", ("TTFT p50 s", "TTFT p99 s")),
    ("ITL p50 and p99, ms", ("ITL p50 ms", "ITL p99 ms")),
    ("preemptions per 100", ("preempted %",)),
    ("pool in use, %", ("pool %",)),
)


def draw(results: dict[str, Rows], path: Path) -> None:
    """Write a figure of the rows of each trace, one row a policy, in the format of the file's name."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "monoloop", "font.size": 8})
    figure = Figure(figsize=(13, 1 + 1.5 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), len(PANELS), sharey=True, squeeze=False)
    grid[0][0].invert_yaxis()
    for axes, (trace, rows) in zip(grid, results.items(), strict=True):
        names = [row["policy"] for row in rows]
        colors = ["tab:gray" if name in NAIVE else "tab:blue" for name in names]
        axes[0].set_ylabel(trace)
        for axis, (title, columns) in zip(axes, PANELS, strict=True):
            for column in reversed(columns):
                alpha = 1.0 if column is columns[0] else 0.4
                axis.barh(names, [row[column] for row in rows], color=colors, alpha=alpha)
            if "TTFT" in title:
                axis.set_xscale("log")
            if trace == next(iter(results)):
                axis.set_title(title, fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
