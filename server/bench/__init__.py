"""`monoloop bench`: drive a live server with many streams and print what they saw.

settings -> workload (prompts, arrival times) -> load (client: one stream each) -> report, plot

`static` and `kernel` (device.py) measure the device in this process instead.
"""

from server.bench.command import run
from server.bench.settings import BenchSettings

__all__ = ["BenchSettings", "run"]
