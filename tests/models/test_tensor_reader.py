"""Tensors as they are stored, read in parallel, and the memory that takes.

Covers models/tensor_reader.py.
"""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from models.errors import ModelError
from models.safetensors_file import read_header
from models.tensor_reader import NUM_THREADS, read_ahead, read_tensors, same_values
from tests.models.harness import CPU

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]
SHAPES = [(3, 5), (7,), (), (0, 4), (2, 3, 1), (1, 1)]


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    tensors = {
        f"{index}{str(dtype)[6:]}": (torch.randn(shape) * 3).to(dtype)
        for index, shape in enumerate(SHAPES)
        for dtype in DTYPES
    }
    save_file(tensors, tmp_path / "some.safetensors")
    return tmp_path / "some.safetensors"


def raw(tensor):
    return tensor.shape, tensor.dtype, tensor.flatten().view(torch.uint8).tolist()


def test_values_of_every_dtype_and_shape(file):
    header = read_header(file)
    found = dict(zip(header, read_tensors(header.values(), CPU), strict=True))
    expected = load_file(file)
    assert found.keys() == expected.keys()
    assert all(raw(found[name]) == raw(expected[name]) for name in expected)


def test_order_is_the_callers(file):
    header = read_header(file)
    names = list(header)[::-2]
    expected = load_file(file)
    for name, tensor in zip(names, read_tensors([header[name] for name in names], CPU), strict=True):
        assert raw(tensor) == raw(expected[name])


def test_a_file_that_shrinks_after_its_header_was_read(file):
    header = read_header(file)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"some\.safetensors cannot be read: it ends in the middle of"):
        list(read_tensors(header.values(), CPU))


def test_a_file_that_disappears(file):
    header = read_header(file)
    file.unlink()
    with pytest.raises(ModelError, match=r"some\.safetensors cannot be read: No such file"):
        list(read_tensors(header.values(), CPU))


def test_results_are_in_order_and_only_a_few_are_read_ahead():
    first_may_end, started = threading.Event(), []

    def read(item):
        started.append(item)
        if item == 0:
            assert first_may_end.wait(30)
        return -item

    results = read_ahead(range(50), read)
    timer = threading.Timer(0.05, first_may_end.set)
    timer.start()
    assert next(results) == 0
    assert len(started) <= NUM_THREADS + 1
    assert list(results) == [-item for item in range(1, 50)]
    assert sorted(started) == list(range(50))


def test_an_error_ends_the_reading():
    def read(item):
        if item == 3:
            raise ModelError("the third")
        return item

    seen = []
    with pytest.raises(ModelError, match="the third"):
        seen.extend(read_ahead(range(10**9), read))
    assert seen == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if "read weights" in thread.name]


def test_same_values(tmp_path):
    torch.manual_seed(0)
    a = torch.randn(100, 7)
    b = a.clone()
    b[-1, -1] += 1
    tensors = {"a": a, "again": a.clone(), "b": b, "flat": a.flatten().clone(), "int": a.view(torch.int32)}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "some.safetensors")
    header = read_header(tmp_path / "some.safetensors")
    assert [name for name in header if same_values(header["a"], header[name])] == ["a", "again"]


LOAD = """
import sys
from pathlib import Path
import torch
from models.loader import load
from tests.models.harness import CPU, files_of

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

small, large = map(Path, sys.argv[1:])
load(files_of(small), torch.float32, CPU)  # what libraries allocate once
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
start = status("VmRSS")
model = load(files_of(large), torch.float32, CPU)
print(status("VmHWM") - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_of_host_memory_is_the_weights_and_less_than_one_shard(tmp_path):
    """VmHWM counts anonymous memory and mapped files; on a CPU the weights themselves are in host memory."""
    sizes = {"num_attention_heads": 8, "tie_word_embeddings": False}
    small = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=64, **sizes)
    large = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, vocab_size=2048, **sizes
    )
    shard_bytes = 32_000_000
    LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    LlamaForCausalLM(large).save_pretrained(tmp_path / "large", max_shard_size=shard_bytes)
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    total = index["metadata"]["total_size"]
    assert total > 3 * shard_bytes
    command = [sys.executable, "-c", LOAD, tmp_path / "small", tmp_path / "large"]
    # glibc returns memory of tensors above 32 MB at once; these are smaller, but shall be no exception.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    grown = int(process.stdout)
    assert total < grown < total + shard_bytes
