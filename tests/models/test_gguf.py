"""The container, read whole or cut off, and the block types against the gguf package."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from models.errors import ModelError
from models.gguf.dequantize import dequantize
from models.gguf.file import GGUFFile, GGUFTensor

# Where a block keeps its float16 scales; all other bytes may be anything.
SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.mark.parametrize("kind", SCALES)
def test_blocks_equal_the_reference(kind):
    rng = np.random.default_rng(0)
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    # Enough rows for several chunks, the last of them short.
    rows, blocks = 301, 2
    raw = rng.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        raw[..., offset : offset + 2] = scales.view(np.uint8)
    raw = raw.reshape(rows, -1)
    tensor = GGUFTensor("t", GGMLQuantizationType[kind], (rows, blocks * block_values), raw)
    expected = torch.from_numpy(gguf.dequantize(raw, tensor.type))
    # The reference multiplies in another order in places: two roundings of values up to a few hundred.
    torch.testing.assert_close(dequantize(tensor, torch.float32), expected, rtol=1e-6, atol=1e-4)
    assert torch.equal(dequantize(tensor, torch.bfloat16), dequantize(tensor, torch.float32).bfloat16())


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "IQ4_NL"])
def test_rare_types_go_through_the_reference(kind):
    kind = GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 60, (5, 3 * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    tensor = GGUFTensor("t", kind, (5, 3 * GGML_QUANT_SIZES[kind][0]), raw)
    assert torch.equal(dequantize(tensor, torch.float32), torch.from_numpy(gguf.dequantize(raw, kind)))


def test_unknown_block_type_is_refused():
    tensor = GGUFTensor("blk.0.odd", GGMLQuantizationType.Q8_1, (1, 32), np.zeros((1, 36), dtype=np.uint8))
    with pytest.raises(ModelError, match=r"blk\.0\.odd is of type Q8_1"):
        dequantize(tensor, torch.float32)


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
    matrix = dequantize(file.tensors["matrix"], torch.float32)
    assert matrix.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert dequantize(file.tensors["halves"], torch.float32).shape == (2, 3, 5)


def test_a_file_cut_off_anywhere(tiny, tmp_path):
    whole = tiny.read_bytes()
    end_of_data = 12 * 4 + 30 * 2
    short = tmp_path / "short.gguf"
    # Padding after the last tensor may be missing; nothing before it may.
    for length in [*range(1, len(whole) - end_of_data, 7), len(whole) - 32]:
        short.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"short\.gguf is not a complete GGUF file"):
            GGUFFile(short)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 40, "beyond the end"),
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
