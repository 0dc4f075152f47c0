"""Pooling and sizes of vectors, as the files of embedding models declare them."""

import json

import pytest

from models.errors import ModelError
from models.sentence_transformer import declared_pooling, matryoshka_sizes

MODULES = ("Transformer", "Pooling", "Normalize")


def write(folder, pooling, modules=MODULES):
    """Write the files of a sentence-transformers folder."""
    entries = [
        {
            "idx": index,
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def modes(*active):
    """Return a pooling configuration as Qwen3-Embedding has it."""
    names = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    flags = {f"pooling_mode_{name}": name in active for name in names}
    return {"word_embedding_dimension": 1024, **flags, "include_prompt": True}


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (modes("lasttoken"), "last"),
        (modes("mean_tokens"), "mean"),
        (modes("cls_token"), "cls_token"),
        (modes("mean_tokens", "lasttoken"), "mean_tokens and lasttoken"),
        (modes(), "no pooling"),
        ({"embedding_dimension": 1024, "pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"embedding_dimension": 1024, "pooling_mode": "max"}, "max"),
    ],
)
def test_the_pooling_is_the_declared_one(tmp_path, pooling, expected):
    write(tmp_path, pooling)
    assert declared_pooling(tmp_path) == expected


def test_a_folder_without_modules_is_no_embedding_model(tmp_path):
    assert declared_pooling(tmp_path) is None


def test_a_module_that_would_change_the_vectors_is_named(tmp_path):
    write(tmp_path, modes("mean_tokens"), (*MODULES, "Dense"))
    assert declared_pooling(tmp_path) == "a module Dense"
    write(tmp_path, modes("mean_tokens"), ("Transformer",))
    assert declared_pooling(tmp_path) == "no module Pooling"


@pytest.mark.parametrize("text", ["{}", "[1]", "[", '[{"type": "a.Pooling", "path": "nowhere"}]'])
def test_broken_files_are_named(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"\.json"):
        declared_pooling(tmp_path)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, False),
        ({"is_matryoshka": True}, True),
        ({"is_matryoshka": False}, False),
        ({"is_matryoshka": True, "matryoshka_dimensions": [64, 128]}, (64, 128)),
    ],
)
def test_vectors_may_be_cut_as_the_configuration_says(config, sizes):
    assert matryoshka_sizes(config) == sizes
