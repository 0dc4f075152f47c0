"""A CUDA error that nothing in the process recovers from. In a process of its own, since it would not."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from engine.device.devices import raise_if_lost
from engine.errors import DeviceLost

torch.zeros(1, device="cuda")
raise_if_lost(RuntimeError("some error that leaves the device alone"))
table, index = torch.zeros(4, device="cuda"), torch.tensor([1000], device="cuda")
try:
    table[index]  # the kernel asserts that the index is in range
    torch.cuda.synchronize()
except Exception as error:
    try:
        raise_if_lost(error)
    except DeviceLost as lost:
        print("lost:", lost)
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("device")
def test_a_poisoned_context_is_a_lost_device():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert "lost: The device has failed" in done.stdout, done.stdout + done.stderr[-2000:]
