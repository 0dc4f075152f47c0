"""`monoloop bench`: drive a live server with many streams and print what they saw.

settings -> workload (prompts, arrival times) -> load (client: one stream each) -> report, plot
"""

from server.bench.command import run
from server.bench.settings import BenchSettings

__all__ = ["BenchSettings", "run"]
