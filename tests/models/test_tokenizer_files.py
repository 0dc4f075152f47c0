"""Ids of special tokens, found in a tokenizer's files, and conversions that are done once or fail by name.

What a converted tokenizer encodes is tested in test_gguf_tokenizer.py.
"""

import json

import pytest

from models.errors import ModelError
from models.tokenizer_files import convert_tokenizer, token_ids


def write(folder, config, tokenizer=None):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("written", ["<end>", {"content": "<end>", "special": True}])
def test_the_configuration_is_asked_before_the_tokenizer(tmp_path, written):
    tokenizer = {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"<end>": 3}}}
    config = {"eos_token": written}
    write(tmp_path, config | {"added_tokens_decoder": {"9": {"content": "<end>"}}}, tokenizer)
    assert token_ids(tmp_path, "eos_token") == [9]
    write(tmp_path, config | {"added_tokens_decoder": {"9": {"content": "<pad>"}}}, tokenizer)
    assert token_ids(tmp_path, "eos_token") == [7]
    write(tmp_path, config, tokenizer | {"added_tokens": []})
    assert token_ids(tmp_path, "eos_token") == [3]


def test_roles_are_told_apart(tmp_path):
    write(tmp_path, {"bos_token": "a", "eos_token": "b"}, {"model": {"vocab": {"a": 1, "b": 2}}})
    assert [token_ids(tmp_path, role) for role in ("bos_token", "eos_token", "pad_token")] == [[1], [2], []]


@pytest.mark.parametrize("vocabulary", [{}, {"vocab": {"a": 1}}, {"vocab": [["<pad>", -1.5]]}])
def test_a_token_that_is_nowhere_has_no_id(tmp_path, vocabulary):
    """The vocabulary of a Unigram model is a list of pairs."""
    write(tmp_path, {"eos_token": "<end>"}, {"model": vocabulary})
    assert token_ids(tmp_path, "eos_token") == []


def test_files_may_be_missing(tmp_path):
    assert token_ids(tmp_path, "eos_token") == []
    write(tmp_path, {"eos_token": "<end>"})
    assert token_ids(tmp_path, "eos_token") == []


def test_a_broken_tokenizer_is_named(tmp_path):
    write(tmp_path, {"eos_token": "<end>"})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        token_ids(tmp_path, "eos_token")


def test_a_file_that_cannot_be_converted_is_named_and_leaves_nothing(tmp_path):
    with pytest.raises(ModelError, match=r"model\.gguf: its tokenizer is of the kind 'rwkv'"):
        convert_tokenizer(tmp_path / "model.gguf", {"tokenizer.ggml.model": "rwkv"}, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class Converted:
    """A tokenizer whose saving may be overtaken by another process."""

    def __init__(self, on_save):
        self.save_pretrained = on_save


@pytest.fixture
def converted(monkeypatch):
    def convert(on_save):
        monkeypatch.setattr("models.gguf.tokenizer.build_tokenizer", lambda _: Converted(on_save))

    return convert


def test_a_conversion_is_done_once(tmp_path, converted):
    saved = []

    def save(scratch):
        saved.append(scratch)
        (scratch / "tokenizer.json").write_text("{}")

    converted(save)
    folders = [convert_tokenizer(tmp_path / "model.gguf", {}, tmp_path / "cache") for _ in range(2)]
    assert folders[0] == folders[1] and (folders[0] / "tokenizer.json").is_file()
    assert len(saved) == 1 and list((tmp_path / "cache").iterdir()) == [folders[0]]


def test_two_processes_may_convert_at_the_same_time(tmp_path, converted):
    target = tmp_path / "cache" / "tokenizer-3"

    def save(scratch):
        (scratch / "tokenizer.json").write_text("ours")
        target.mkdir()
        (target / "tokenizer.json").write_text("theirs")

    converted(save)
    assert convert_tokenizer(tmp_path / "model.gguf", {}, tmp_path / "cache") == target
    assert (target / "tokenizer.json").read_text() == "theirs"
    assert list(target.parent.iterdir()) == [target]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, converted):
    converted(lambda scratch: None)
    (tmp_path / "cache").touch()
    with pytest.raises(ModelError, match=r"cannot write to the cache folder .*cache"):
        convert_tokenizer(tmp_path / "model.gguf", {}, tmp_path / "cache")
