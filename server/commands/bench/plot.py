"""Draws a run: how latencies are distributed and how tokens flowed over time."""

from pathlib import Path

import numpy as np

from server.commands.bench.load import Run


def plot(run: Run, title: str, path: Path) -> None:
    """Write a PNG: the distributions of TTFT, ITL and end-to-end latency, and chunks per second over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [result for result in run.results if result.error is None]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2).ravel()
    latencies = {
        "TTFT": [result.ttft_seconds for result in good],
        "ITL (between chunks)": [gap for result in good for gap in np.diff(result.chunk_seconds)],
        "end to end": [result.end_to_end_seconds for result in good],
    }
    for axis, (name, seconds) in zip(axes, latencies.items(), strict=False):
        milliseconds = np.sort(np.asarray(seconds)) * 1e3
        axis.plot(
            milliseconds,
            np.arange(1, len(milliseconds) + 1) / max(1, len(milliseconds)),
            drawstyle="steps-post",
        )
        axis.set(title=name, xlabel="ms", ylabel="share of samples at most this", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    times = np.asarray([at for result in run.results for at in result.chunk_seconds])
    if times.size:
        times -= min(result.start_seconds for result in run.results)
        counts, edges = np.histogram(times, bins=60, range=(0, run.elapsed_seconds))
        axes[3].stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)
    axes[3].set(title="chunks over time", xlabel="s", ylabel="chunks per second")
    axes[3].grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
