"""Headers of safetensors files: where tensors lie, and every way in which a header can be wrong.

Covers models/safetensors_file.py.
"""

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from models.errors import ModelError
from models.safetensors_file import read_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_where_tensors_lie(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.tensor(1, dtype=torch.int8), "c": torch.ones(0, 4)}
    path = tmp_path / "some.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    starts = [tensor.start for tensor in header.values()]
    assert starts == sorted(starts)
    assert sum(tensor.num_bytes for tensor in header.values()) == 25
    whole = path.read_bytes()
    assert whole[header["a"].start :][:24] == struct.pack("<6f", *[1.0] * 6)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "its header is not JSON"),
        (b"\xff\xfe{}", "its header is not JSON"),
        (b"[" * 100_000, "recursion"),
        ([], "its header is not a JSON object"),
        ({"a": 3}, "the entry of a in its header is not a JSON object"),
        ({"a": {}}, "a has the dtype None"),
        ({"a": {**F32, "dtype": "F12"}}, "a has the dtype 'F12', which is not supported"),
        ({"a": {**F32, "dtype": ["F32"]}}, "a has the dtype"),
        ({"a": {**F32, "shape": None}}, "a has no shape"),
        ({"a": {**F32, "shape": [-2]}}, "a has no shape"),
        ({"a": {**F32, "shape": [True, 2]}}, "a has no shape"),
        ({"a": {**F32, "shape": [2.0]}}, "a has no shape"),
        ({"a": {**F32, "data_offsets": [0]}}, "a has no shape and data_offsets"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, "a has -8 bytes"),
        ({"a": {**F32, "shape": [3]}}, r"a has 8 bytes, which a tensor of \[3\] cannot have"),
        ({"a": {**F32, "shape": [2**40, 2**40]}}, "a has 8 bytes"),
        ({"a": {**F32, "shape": [0, 2**80], "data_offsets": [0, 0]}}, "a has 0 bytes"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, "b overlaps with a"),
        ({"a": F32, "b": F32}, "b overlaps with a"),
        ({"a": {**F32, "data_offsets": [4, 12]}}, "a leaves a gap after the header"),
        ({"a": {**F32, "shape": [4], "data_offsets": [0, 16]}}, "it is truncated: it has"),
        ({"a": {**F32, "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, "it is truncated: it has"),
        ({"a": {**F32, "shape": [1], "data_offsets": [0, 4]}}, "it has 4 bytes after its last tensor"),
        ({}, "it has 8 bytes after its last tensor"),
    ],
)
def test_broken_headers(tmp_path, header, message):
    path = write(tmp_path / "some.safetensors", header)
    with pytest.raises(ModelError, match=rf"some\.safetensors cannot be read: .*{message}"):
        read_header(path)


@pytest.mark.parametrize("length", [10**12, 2**64 - 1, 100_000_001])
def test_a_header_that_says_it_is_huge(tmp_path, length):
    path = write(tmp_path / "some.safetensors", {"a": F32}, length=length)
    with pytest.raises(ModelError, match=f"it says that its header has {length} bytes"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 10) + b"{}"])
def test_truncated_files(tmp_path, content):
    (tmp_path / "some.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="it is truncated"):
        read_header(tmp_path / "some.safetensors")


def test_a_pointer_of_git_lfs(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (tmp_path / "some.safetensors").write_text(pointer)
    with pytest.raises(ModelError, match="fetch them with `git lfs pull`"):
        read_header(tmp_path / "some.safetensors")


def test_a_folder(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path)


@settings(max_examples=200)
@given(data=st.data())
def test_changed_bytes_are_an_error_or_another_header(data, tmp_path_factory):
    """Any other exception than ModelError fails the test."""
    path = tmp_path_factory.mktemp("changed") / "some.safetensors"
    write(path, {"a": F32, "b": {**F32, "data_offsets": [8, 16]}}, b"\0" * 16)
    content = bytearray(path.read_bytes())
    for index in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[index] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        header = read_header(path)
    except ModelError:
        pass
    else:
        assert sum(tensor.num_bytes for tensor in header.values()) < len(content)
