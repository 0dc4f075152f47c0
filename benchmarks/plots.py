"""Draws what benchmarks.simulate found: a row of bars for each trace."""

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
PANELS = (
    ("output tokens/s", ("output tokens/s",), None),
    ("goodput, requests/s", ("goodput /s",), None),
    ("TTFT p50, p99 (s)", ("TTFT p50 s", "TTFT p99 s"), "log"),
    ("ITL p50, p99 (ms)", ("ITL p50 ms", "ITL p99 ms"), None),
    ("preemptions per 100", ("preemptions %",), None),
    ("pool in use (%)", ("pool use %",), None),
)


def draw(results: dict[str, Rows], path: Path) -> None:
    """Write a figure of the rows of each trace, one row a policy, in the format of the file's name."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "monoloop", "font.size": 8})
    figure = Figure(figsize=(13, 1.2 + 1.7 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), len(PANELS), sharey=True, squeeze=False)
    for axes, (trace, rows) in zip(grid, results.items(), strict=True):
        names = [row["policy"] for row in rows]
        for axis, (title, columns, scale) in zip(axes, PANELS, strict=True):
            for column, alpha in zip(
                reversed(columns), (0.4, 1.0) if len(columns) > 1 else (1.0,), strict=True
            ):
                values = [row[column] for row in rows]
                colors = [
                    "tab:gray" if "overcommit" not in name and "step" not in name else "tab:blue"
                    for name in names
                ]
                axis.barh(names, values, color=colors, alpha=alpha)
            if scale is not None:
                axis.set_xscale(scale)
            if axes is grid[0]:
                axis.set_title(title, fontsize=8)
            axis.invert_yaxis()
        axes[0].set_ylabel(trace)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
