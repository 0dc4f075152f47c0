"""What we measure, and against whom. Each module is a script: `python -m benchmarks.<name>`."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine, but before any script imports torch
