"""The container, read whole or cut off, and the block types against the gguf package.

Covers models/gguf/blocks.py and models/gguf/dequantize.py.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import ModelError
from models.gguf.blocks import unpack
from models.gguf.dequantize import dequantize
from models.gguf.file import GGUFFile, GGUFTensor
from tests.models.harness import CPU

# The types that llama.cpp's quantize tool writes for the supported models, but for the smallest.
KINDS = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]


def random_tensor(kind, rows=301, blocks=2, seed=0):
    """Any bytes are a tensor; among random scales are infinities, NaNs and the smallest numbers."""
    kind = GGMLQuantizationType[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks *= 256 // block_values
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * block_bytes), dtype=np.uint8)
    return GGUFTensor("t", kind, (rows, blocks * block_values), raw)


def reference(tensor):
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(gguf.dequantize(tensor.raw, tensor.type), dtype=np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_the_reference(kind):
    tensor = random_tensor(kind)  # several chunks, the last of them short
    found, expected = dequantize(tensor, torch.float32, CPU), reference(tensor)
    assert expected.isfinite().float().mean() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(
            dequantize(tensor, dtype, CPU), expected.to(dtype), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_cpu(kind):
    tensor = random_tensor(kind)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantize(tensor, dtype, torch.device("cuda")).cpu()
        expected = dequantize(tensor, dtype, CPU)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("byte", [0, 1, 0x7B, 0x7F, 0x80, 0xFC, 0xFF])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_byte_equal_the_reference(kind, byte):
    """The least and the greatest scales and integers: zeros, subnormals, negative ones, NaN."""
    tensor = random_tensor(kind, rows=1)
    tensor.raw.fill(byte)
    torch.testing.assert_close(
        dequantize(tensor, torch.float32, CPU), reference(tensor), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS[3:])
def test_groups_are_integers_that_share_a_scale(kind):
    tensor = random_tensor(kind)
    groups = unpack(torch.from_numpy(tensor.raw), tensor.type)
    size = 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32
    assert groups.codes.dtype == torch.int8
    assert groups.codes.shape == (tensor.raw.shape[0] * 512 // size, size)
    assert groups.scales.shape == (groups.codes.shape[0], 1)
    assert (groups.offsets is not None) == (kind in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"))


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("IQ1_S", "Q2_K"),
        ("IQ2_XXS", "Q2_K"),
        ("TQ1_0", "Q2_K"),
        ("TQ2_0", "Q2_K"),
        ("IQ3_XXS", "Q3_K"),
        ("IQ3_S", "Q3_K"),
        ("Q8_1", "F16"),
        ("I8", "Q8_0"),
        ("F64", "F32"),
    ],
)
def test_other_types_are_refused_with_the_nearest(kind, nearest):
    with pytest.raises(
        ModelError, match=rf"t is of type {kind}, which .* the nearest type that is: {nearest}$"
    ):
        dequantize(random_tensor(kind, rows=1), torch.float32, CPU)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("number", 7)
    writer.add_int64("large", -(2**40))
    writer.add_float32("real", 0.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 日本")
    writer.add_array("texts", ["a", "ä", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("halves", np.ones((2, 3, 5), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_container(tiny):
    file = GGUFFile(tiny)
    found = {
        key: file.metadata[key] for key in ("number", "large", "real", "yes", "text", "texts", "numbers")
    }
    assert found == {
        "number": 7,
        "large": -(2**40),
        "real": 0.5,
        "yes": True,
        "text": "naïve 日本",
        "texts": ["a", "ä", ""],
        "numbers": [1, -2, 3],
    }
    matrix = dequantize(file.tensors["matrix"], torch.float32, CPU)
    assert matrix.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert dequantize(file.tensors["halves"], torch.float32, CPU).shape == (2, 3, 5)


def test_a_file_cut_off_anywhere(tiny, tmp_path):
    whole = tiny.read_bytes()
    end_of_data = 12 * 4 + 30 * 2
    short = tmp_path / "short.gguf"
    # Padding after the last tensor may be missing; nothing before it may.
    for length in [*range(1, len(whole) - end_of_data, 7), len(whole) - 32]:
        short.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"short\.gguf is not a complete GGUF file"):
            GGUFFile(short)


def scalar(value, size=4):
    return value.to_bytes(size, "little")


def string(text):
    return scalar(len(text), 8) + text.encode()


def tensor_info(name, *, shape=(4, 2), kind=0, offset=0):
    sizes = b"".join(scalar(size, 8) for size in shape)
    return string(name) + scalar(len(shape)) + sizes + scalar(kind) + scalar(offset, 8)


def header(*, keys=(), tensors=(), num_keys=None, num_tensors=None, data=0):
    counts = scalar(num_tensors or len(tensors), 8) + scalar(num_keys or len(keys), 8)
    return b"GGUF" + scalar(3) + counts + b"".join((*keys, *tensors)) + bytes(data)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(40), "begins with b'GGML', not with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "it is big-endian"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(40), "version 9 is not supported"),
        (header(num_tensors=10**18), "0 keys and 1000000000000000000 tensors do not fit in its 24 bytes"),
        (header(num_keys=10**18), "1000000000000000000 keys and 0 tensors do not fit"),
        (header(keys=[string("a") + scalar(99)]), "the value of a: its type number 99 is not supported"),
        (
            header(keys=[string("a") + scalar(9) + scalar(9) + scalar(1, 8)]),
            "the value of a: its type number 9",
        ),
        (
            header(keys=[string("a") + scalar(9) + scalar(4) + scalar(10**18, 8)]),
            "the value of a: 10+ numbers",
        ),
        (
            header(keys=[string("a") + scalar(8) + scalar(10**18, 8)]),
            "the value of a: a string reaches beyond",
        ),
        (header(keys=[string("a") + scalar(8) + scalar(1, 8) + b"\xff"]), "the value of a: 'utf-8' codec"),
        (header(keys=[string("a") + scalar(4) + scalar(1)] * 2), "the key a appears twice"),
        (header(tensors=[tensor_info("w")] * 2, data=64), "tensor w appears twice"),
        (header(tensors=[tensor_info("w", kind=99)], data=64), "tensor w is of the type number 99"),
        (header(tensors=[tensor_info("w", shape=(4,) * 5)], data=64), "tensor w has 5 dimensions"),
        (header(tensors=[tensor_info("w", shape=(4, 0))], data=64), r"tensor w is empty: \[0, 4\]"),
        (
            header(tensors=[tensor_info("w", shape=(33,), kind=2)], data=64),
            "rows of 33 are not whole Q4_0 blocks",
        ),
        (header(tensors=[tensor_info("w", offset=64)], data=64), "tensor w reaches beyond the end"),
        (
            header(tensors=[tensor_info("w", offset=7)], data=64),
            "tensor w is at 7, which is not a multiple of 32",
        ),
        (
            header(tensors=[tensor_info("w", offset=32), tensor_info("v", shape=(9,))], data=96),
            "tensor w overlaps with v$",
        ),
        (
            header(tensors=[tensor_info("w", shape=(2**40, 2**40))], data=64),
            "tensor w reaches beyond the end",
        ),
    ],
)
def test_other_files_are_refused(content, reason, tmp_path):
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        GGUFFile(path)


def test_damaged_headers_raise_model_error_only(tiny, tmp_path):
    """Any byte of the header may be wrong; what comes out is a file that reads, or a ModelError."""
    whole = tiny.read_bytes()
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(600):
        content = bytearray(whole)
        at = int(rng.integers(0, len(whole) - 128))
        content[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, rng.bytes(8)])[:8].ljust(8, b"\0")
        damaged.write_bytes(content)
        try:
            GGUFFile(damaged)
        except ModelError:
            refused += 1
    assert refused > 300, "the damage was mostly not noticed, so the test shows nothing"
