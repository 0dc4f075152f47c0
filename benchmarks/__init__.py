"""Scripts of the developers: comparisons, simulations and checks. Run one with `python -m benchmarks.<name>`.

What users measure are commands: `monoloop bench` loads a running server (server/commands/bench), `bench
static` and `bench kernel` time steps and ops on the device (engine/bench).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine, but before any script imports torch
