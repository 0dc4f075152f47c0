"""What a server on a CPU loads to serve the default model."""

import subprocess
import sys

import pytest
import torch

# Each takes tens of megabytes and tenths of a second, and serving a .gguf file on a CPU needs none of them.
UNUSED = (
    "matplotlib",
    "pandas",
    "scipy",
    "sympy",
    "torch._dynamo",
    "transformers",
    "triton",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs and kernels are compiled here")
def test_a_server_on_a_cpu_imports_nothing_that_it_does_not_use(smollm):
    program = f"""
import asyncio, sys
from pathlib import Path
from engine import Engine
from engine.config import EngineConfig
from engine.request import Request, SamplingParams

async def main():
    config = EngineConfig(model={str(smollm.weights)!r}, kv_tokens=256, device="cpu")
    engine = await Engine.start(config)
    stream = engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=2)))
    await stream.collect()
    await engine.stop()

asyncio.run(main())
print([name for name in {UNUSED!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stdout
