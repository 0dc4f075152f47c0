"""Fingerprints change with the weights and the configuration, not with the names of files."""

import json

import pytest

from models.errors import ModelError
from models.fingerprint import PIECE_BYTES, fingerprint
from tests.models.harness import files_of

LARGE = 3 * PIECE_BYTES * 16  # several times what is read of a file


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(LARGE))
    return folder


def changed(folder, position):
    """Return the fingerprint after a change of one byte of the weights."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(position)
        file.write(b"\1")
    return fingerprint(files_of(folder))


def test_it_is_a_short_hash_that_does_not_depend_on_the_folder(folder):
    before = fingerprint(files_of(folder))
    assert len(bytes.fromhex(before)) == 16
    assert fingerprint(files_of(folder.rename(folder.with_name("other")))) == before


@pytest.mark.parametrize("position", [0, PIECE_BYTES - 1, (LARGE - PIECE_BYTES) // 15, LARGE - 1])
def test_the_pieces_cover_the_head_the_middle_and_the_end(folder, position):
    assert fingerprint(files_of(folder)) != changed(folder, position)


def test_only_the_pieces_are_read(folder):
    assert fingerprint(files_of(folder)) == changed(folder, PIECE_BYTES)


def test_a_small_file_is_read_whole(folder):
    (folder / "model.safetensors").write_bytes(bytes(10))
    found = {fingerprint(files_of(folder)), *(changed(folder, position) for position in range(10))}
    assert len(found) == 11


def test_the_size_counts(folder):
    found = set()
    for size in (0, 1, LARGE, LARGE + 1):
        (folder / "model.safetensors").write_bytes(bytes(size))
        found.add(fingerprint(files_of(folder)))
    assert len(found) == 4


def test_the_configuration_counts(folder):
    before = fingerprint(files_of(folder))
    (folder / "config.json").write_text('{"rope_theta": 5.0}')
    assert fingerprint(files_of(folder)) != before


def test_every_shard_counts(folder):
    shards = ["a.safetensors", "b.safetensors"]
    index = {"weight_map": {"x": shards[0], "y": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = set()
    for contents in ((b"1", b"2"), (b"2", b"1"), (b"1", b"1")):
        for shard, content in zip(shards, contents, strict=True):
            (folder / shard).write_bytes(content)
        found.add(fingerprint(files_of(folder)))
    assert len(found) == 3


def test_a_gguf_file_has_no_configuration_beside_it(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    before = fingerprint(files_of(path))
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint(files_of(path)) == before


def test_every_part_of_a_gguf_model_counts(tmp_path):
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    found = set()
    for contents in ((b"1", b"2"), (b"2", b"1"), (b"1", b"1")):
        for part, content in zip(parts, contents, strict=True):
            part.write_bytes(content)
        found.add(fingerprint(files_of(parts[0])))
    assert len(found) == 3


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        fingerprint(files_of(folder))
