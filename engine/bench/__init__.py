"""Device benchmarks: times of single ops and single steps, with random weights and without requests.

    measure_ops(...)    `monoloop bench kernel`: each op, and the share of the time its bytes and FLOPs need
    measure_steps(...)  `monoloop bench static`: decode and prefill steps of a whole model, and their lower
    bound

The load generator, which measures a running server, is server/commands/bench. Importing this takes seconds,
since it imports torch.
"""

from engine.bench.ops import OP_NAMES, OpTime, measure_ops
from engine.bench.probe import Ceilings
from engine.bench.steps import SHAPE_NAMES, StepsToMeasure, StepTime, measure_steps, with_formats

__all__ = [
    "OP_NAMES",
    "SHAPE_NAMES",
    "Ceilings",
    "OpTime",
    "StepTime",
    "StepsToMeasure",
    "measure_ops",
    "measure_steps",
    "with_formats",
]
