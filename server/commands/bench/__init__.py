"""`monoloop bench`: drive a live server with many streams and print what they saw.

settings -> workload (prompts, arrival times) -> load (client: one stream each) -> report, plot

`static` and `kernel` (device.py) measure the device in this process instead.
"""

from server.commands.bench.command import run
from server.commands.bench.settings import BenchSettings
from server.flags import SettingsError, did_you_mean, parse_flags

__all__ = ["BenchSettings", "main", "run"]


def main(arguments: list[str]) -> int:
    """Run one of the benchmarks; return the exit code. Raises SettingsError."""
    if arguments[:1] in (["static"], ["kernel"]):
        from server.commands.bench import device

        if arguments[0] == "static":
            return device.static(parse_flags(arguments[1:], "bench static", device.StaticSettings))
        return device.kernel(parse_flags(arguments[1:], "bench kernel", device.KernelSettings))
    if arguments and not arguments[0].startswith("-"):
        hint = did_you_mean(arguments[0], ("static", "kernel"))
        raise SettingsError(f"there is no benchmark {arguments[0]!r}; there are static and kernel{hint}")
    return run(parse_flags(arguments, "bench", BenchSettings))
