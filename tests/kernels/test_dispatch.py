import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import dispatch, forced


def double_triton(x: torch.Tensor) -> str:
    return "triton"


def double_torch(x: torch.Tensor) -> str:
    """What the op does."""
    return "torch"


double = dispatch(double_triton, double_torch)


def test_cpu_tensors_take_the_twin_and_a_test_can_force_either():
    x = torch.zeros(1)
    assert double(x) == "torch"
    with forced("triton"):
        assert double(x) == "triton"
        with forced("torch"):
            assert double(x) == "torch"
        assert double(x) == "triton"
    assert double(x) == "torch"


def test_the_override_ends_with_an_exception():
    with pytest.raises(ValueError, match="from inside"), forced("triton"):
        raise ValueError("from inside")
    assert double(torch.zeros(1)) == "torch"


def test_the_op_carries_name_and_documentation_of_the_twin():
    assert double.__name__ == "double"
    assert double.__doc__ == "What the op does."


@pytest.mark.gpu
def test_cuda_tensors_take_triton():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert double(torch.zeros(1, device="cuda")) == "triton"


@pytest.mark.skipif(torch.cuda.is_available(), reason="triton is used here")
def test_triton_is_not_imported_without_a_gpu():
    program = "import sys; import kernels.rms_norm; print('triton' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "False\n", done.stdout


def test_every_op_imports_and_runs_without_triton():
    """There are no triton wheels outside Linux."""
    program = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import importlib, pathlib, torch
for path in sorted(pathlib.Path("kernels").glob("*.py")):
    importlib.import_module(f"kernels.{path.stem}")
from kernels.dispatch import HAS_TRITON
from kernels.rms_norm import rms_norm
assert not HAS_TRITON
print(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1.0, 1.0, 1.0, 1.0]]"
