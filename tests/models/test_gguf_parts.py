"""Models in one or several GGUF files: whole ones, those with parts missing or mixed up, damaged ones.

Covers models/gguf/parts.py and models/gguf/checkpoint.py.
"""

import shutil
from contextlib import suppress

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.catalog import locate
from models.errors import ModelError
from models.gguf.parts import first_parts, model_name, part_paths
from models.loader import load, read_spec
from tests.models.families import make, prompt
from tests.models.gguf_files import write_gguf
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

HEADER_BYTES = 4000  # of the tiny file: metadata, then names and places of the tensors


@pytest.fixture(scope="module")
def model():
    return make("llama")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", model)


@pytest.fixture
def parts(model, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", model, tensors_per_part=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in found] == [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def edit(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def number_of_part(number):
    """The metadata that says which part a file is, numbered from 0."""
    return b"split.no" + (2).to_bytes(4, "little") + number.to_bytes(2, "little")


def test_any_part_and_the_folder_are_the_model(model, parts, tmp_path):
    ids = prompt(40)
    expected = transformers_logits(model, ids)
    for given_name in (*parts, tmp_path):
        files = locate(str(given_name), tmp_path / "cache")
        assert (files.name, files.weights, files.format) == ("tiny", parts[0], "gguf")
        found = forward_logits(load(files, torch.float32, CPU), ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_missing_parts_are_named(parts, tmp_path):
    parts[0].unlink()
    parts[2].unlink()
    for given_name in (parts[1], tmp_path):
        with pytest.raises(ModelError, match=r"lacks tiny-00001-of-00003\.gguf, tiny-00003-of-00003\.gguf"):
            locate(str(given_name), tmp_path / "cache")


def test_parts_in_the_wrong_order(parts):
    edit(parts[1], number_of_part(1), number_of_part(2))
    with pytest.raises(ModelError, match=r"00002-of-00003.*the metadata says part 2 \(from 0\) of 3"):
        read_spec(files_of(parts[0]))


def test_a_part_without_a_number_in_its_name(parts, tmp_path):
    alone = shutil.copy(parts[0], tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"alone\.gguf: the metadata says part 0 .* of 3, .* part 0 of 1"):
        read_spec(files_of(alone))


def test_parts_of_two_models(parts, model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(other / "tiny.gguf", model, tensors_per_part=9)
    shutil.copy(other / parts[1].name, parts[1])
    with pytest.raises(ModelError, match=r"the tensor blk\.\d\.\w+\.weight is in another part, too"):
        read_spec(files_of(parts[0]))


def test_names_of_parts(tmp_path):
    assert model_name(tmp_path / "a-b-00002-of-00003.gguf") == "a-b"
    assert model_name(tmp_path / "a-2-of-3.gguf") == "a-2-of-3"
    assert part_paths(tmp_path / "a-2-of-3.gguf") == [tmp_path / "a-2-of-3.gguf"]
    with pytest.raises(ModelError, match="part 4 of 3"):
        part_paths(tmp_path / "a-00004-of-00003.gguf")
    for name in ("b.gguf", "a-00002-of-00003.gguf", "a-00001-of-00003.gguf"):
        (tmp_path / name).touch()
    assert [path.name for path in first_parts(tmp_path)] == ["a-00001-of-00003.gguf", "b.gguf"]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("general.architecture", "architecture .* is not supported"),
        ("llama.embedding_length", "the metadata lacks 'llama.embedding_length'"),
        ("llama.block_count", "the metadata lacks 'llama.block_count'"),
        ("llama.context_length", "the metadata lacks 'llama.context_length'"),
        ("llama.attention.head_count", "the metadata lacks 'llama.attention.head_count'"),
    ],
)
def test_missing_metadata_is_named(whole, tmp_path, key, reason):
    damaged = shutil.copy(whole, tmp_path / "damaged.gguf")
    misspelt = key[:-1] + "_"
    content = damaged.read_bytes()
    header = len(key).to_bytes(8, "little")
    damaged.write_bytes(content.replace(header + key.encode(), header + misspelt.encode()))
    with pytest.raises(ModelError, match=rf"damaged\.gguf: {reason}"):
        read_spec(files_of(damaged))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("block_count", 2**31, "the metadata says 2147483648 layers, and it has 2"),
        ("embedding_length", 2**31, "2147483648"),
        ("feed_forward_length", 2**31, "2147483648"),
        ("attention.head_count", 0, "attention.head_count is 0"),
        ("context_length", 2**31, "max_position_embeddings is 2147483648"),
        ("context_length", 0, "max_position_embeddings is 0"),
    ],
)
def test_sizes_that_are_not_those_of_the_tensors(whole, tmp_path, key, value, reason):
    damaged = shutil.copy(whole, tmp_path / "damaged.gguf")
    content = damaged.read_bytes()
    start = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    damaged.write_bytes(content[:start] + value.to_bytes(4, "little") + content[start + 4 :])
    with pytest.raises(ModelError, match=reason):
        load(files_of(damaged), torch.float32, CPU)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_loads_or_is_refused(whole, tmp_path, data):
    """Bytes are flipped and the end is cut off anywhere; no other error than ModelError comes of it."""
    content = bytearray(whole.read_bytes())
    places = st.one_of(*(st.integers(0, end) for end in (600, HEADER_BYTES, len(content) - 1)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(places)] ^= data.draw(st.integers(1, 255))
    length = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[:length])
    with suppress(ModelError):
        load(files_of(damaged), torch.float32, CPU)


def test_the_gguf_package_reads_what_the_tests_write(whole):
    assert len(gguf.GGUFReader(whole).tensors) == 21
