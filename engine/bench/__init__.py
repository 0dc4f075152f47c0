"""What a device takes for single ops and single steps, without requests: random weights of a named shape.

    measure_ops(...)    each op of kernels/ beside what its bytes and FLOPs allow
    measure_steps(...)  decode and prefill steps of a whole model beside their floor

It imports torch, which takes seconds: import it where it is needed.
"""

from engine.bench.ops import OP_NAMES, OpTime, measure_ops
from engine.bench.probe import Ceilings
from engine.bench.steps import SHAPE_NAMES, StepsToMeasure, StepTime, measure_steps

__all__ = [
    "OP_NAMES",
    "SHAPE_NAMES",
    "Ceilings",
    "OpTime",
    "StepTime",
    "StepsToMeasure",
    "measure_ops",
    "measure_steps",
]
