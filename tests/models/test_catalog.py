"""Names to files: the catalog, folders, .gguf files, and what their configurations say.

Covers models/end_tokens.py.
"""

import json

import pytest
from transformers import AutoTokenizer

from models import catalog
from models.catalog import ModelFiles, catalog_names, locate
from models.errors import ModelError
from models.shapes import CONFIGS

CONFIG = {"architectures": ["LlamaForCausalLM"], **CONFIGS["tiny"]}


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    write(folder, "config.json", {**CONFIG, "eos_token_id": 5})
    write(
        folder,
        "tokenizer.json",
        {"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {"a": 0}}},
    )
    (folder / "model.safetensors").touch()
    return folder


def test_catalog_has_the_default_model_first():
    assert catalog_names()[0] == "SmolLM2-135M-Instruct"


def test_folder(folder):
    assert locate(str(folder)) == ModelFiles(
        name="some-model",
        weights=folder,
        format="safetensors",
        tokenizer_dir=folder,
        generation_defaults={},
        eos_token_ids=(5,),
    )


def test_end_tokens_are_the_union_of_all_sources(folder):
    write(folder, "generation_config.json", {"eos_token_id": [3, 5]})
    write(folder, "tokenizer_config.json", {"eos_token": "<end>"})
    assert locate(str(folder)).eos_token_ids == (3, 5, 7)


def test_the_catalog_has_sampling_defaults_for_a_model_without_its_own(folder, monkeypatch):
    entry = {"hub": "owner/model", "sampling": {"temperature": 0.2, "top_p": 0.9}}
    monkeypatch.setattr(catalog, "_read_catalog", lambda: {"short": entry})
    monkeypatch.setattr(catalog, "fetch_from_hub", lambda *_, **__: folder)
    write(folder, "generation_config.json", {"max_new_tokens": 5})
    assert locate("short").generation_defaults == {"temperature": 0.2, "top_p": 0.9, "max_new_tokens": 5}
    write(folder, "generation_config.json", {"do_sample": True, "top_k": 3})
    assert locate("short").generation_defaults == {"top_k": 3}


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        ({"eos_token": {"content": "<stop>"}, "added_tokens_decoder": {"9": {"content": "<stop>"}}}, (9,)),
        ({"eos_token": "<end>"}, (7,)),
        ({"eos_token": "a"}, (0,)),
        ({"eos_token": "nowhere"}, ()),
        ({"eos_token": None}, ()),
    ],
)
def test_end_token_of_the_tokenizer(folder, tokenizer_config, expected):
    write(folder, "config.json", CONFIG)
    write(folder, "tokenizer_config.json", tokenizer_config)
    assert locate(str(folder)).eos_token_ids == expected


def test_end_tokens_outside_the_vocabulary_are_left_out(folder, caplog):
    config = {**CONFIG, "vocab_size": 10, "eos_token_id": [9, 10, -1]}
    write(folder, "config.json", config)
    write(folder, "generation_config.json", {"eos_token_id": [5.0, "7", True, 2.5, [3], None]})
    assert locate(str(folder)).eos_token_ids == (5, 3, 9)
    assert [record.args[1] for record in caplog.records] == ["7", True, 2.5, 10, -1]


def test_end_tokens_of_both_tokenizer_files(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "<end>", "added_tokens_decoder": None})
    write(folder, "special_tokens_map.json", {"eos_token": {"content": "a", "lstrip": False}})
    assert locate(str(folder)).eos_token_ids == (5, 7, 0)


def test_end_token_of_a_vocabulary_that_is_a_list(folder):
    tokenizer = {"added_tokens": None, "model": {"vocab": [["<unk>", 0.0], ["</s>", -1.5]]}}
    write(folder, "tokenizer.json", tokenizer)
    write(folder, "special_tokens_map.json", {"eos_token": "</s>"})
    assert locate(str(folder)).eos_token_ids == (5, 1)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", []),
        ("config.json", {**CONFIG, "matryoshka_dimensions": 3}),
        ("generation_config.json", "text"),
        ("tokenizer_config.json", [1]),
        ("special_tokens_map.json", 3),
        ("tokenizer.json", {"added_tokens": [3], "model": {"vocab": {}}}),
        ("tokenizer.json", {"model": {"vocab": [3]}}),
    ],
)
def test_json_of_another_form_is_one_sentence(folder, name, content):
    write(folder, "tokenizer_config.json", {"eos_token": "nowhere"})
    write(folder, name, content)
    with pytest.raises(ModelError, match=r"config|\.json"):
        locate(str(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "hot"), ("top_p", [0.9]), ("top_k", True), ("min_p", float("nan"))],
)
def test_a_generation_default_that_is_no_number(folder, key, value):
    write(folder, "generation_config.json", {"do_sample": True, key: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} is .*, which is not a number"):
        locate(str(folder))


@pytest.mark.parametrize("do_sample", [True, False])
def test_generation_defaults(folder, do_sample):
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "repetition_penalty": 1.1,
        "max_new_tokens": 100,
    }
    write(folder, "generation_config.json", {"do_sample": do_sample, "transformers_version": "5", **values})
    expected = {"repetition_penalty": 1.1, "max_new_tokens": 100}
    if do_sample:
        expected |= {"temperature": 0.6, "top_p": 0.9}
    assert locate(str(folder)).generation_defaults == expected


def test_folder_without_configuration(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        locate(str(folder))
    for name in ("a", "b-00001-of-00002", "b-00002-of-00002"):
        (folder / f"{name}.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF models; name one: a\.gguf, b-00001-of-00002\.gguf"):
        locate(str(folder))


@pytest.mark.parametrize(
    ("architectures", "named"),
    [
        (["GPT2LMHeadModel"], "GPT2LMHeadModel"),
        ("BertModel", "BertModel"),
        (None, r"\(none named\)"),
        ([3], "none"),
    ],
)
def test_an_unsupported_architecture_is_the_first_complaint(folder, architectures, named):
    write(folder, "config.json", {"architectures": architectures})
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError,
        match=rf"some-model: architecture .*{named}.* is not supported; (nearest: .*; )?`monoloop models`",
    ):
        locate(str(folder))


def test_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        locate(str(folder))


def test_folder_with_pickles_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        locate(str(folder))


def test_file_of_another_kind(folder):
    with pytest.raises(ModelError, match=r"config\.json is neither a folder nor a \.gguf file"):
        locate(str(folder / "config.json"))


def test_a_name_near_one_of_the_catalog_gets_a_hint():
    with pytest.raises(ModelError, match=r"; did you mean SmolLM2-135M-Instruct\?$"):
        locate("SmolLM2-135M-Instrct")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", r"there is no model 'nonsense': .*SmolLM2-135M-Instruct"),
        ("/no/such/folder", r"^there is no folder or \.gguf file '/no/such/folder' on this machine$"),
        ("a/b/c", r"^there is no folder or \.gguf file 'a/b/c' on"),
        ("missing/model.gguf", r"^there is no folder or \.gguf file 'missing/model\.gguf' on"),
    ],
)
def test_unknown_name(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        locate(name)


def test_hub_entries_of_the_catalog(monkeypatch, folder):
    asked = []

    def fetched(repository, cache_dir, *, progress):
        asked.append((repository, cache_dir, progress))
        return folder

    monkeypatch.setattr(catalog, "fetch_from_hub", fetched)
    assert locate("Llama-3.2-1B-Instruct", folder, progress=False).name == "Llama-3.2-1B-Instruct"
    assert locate("owner/Some.Model-1", None).name == "owner/Some.Model-1"
    assert asked == [("meta-llama/Llama-3.2-1B-Instruct", folder, False), ("owner/Some.Model-1", None, True)]


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalog.default_cache_dir() == tmp_path / "monoloop"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.default_cache_dir() == tmp_path / ".cache" / "monoloop"


def test_default_model(smollm):
    assert smollm.name == "SmolLM2-135M-Instruct"
    assert smollm.format == "gguf"
    assert smollm.eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(smollm.tokenizer_dir, local_files_only=True)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    text = "naïve 日本 🙂  12 345\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_default_tokenizer_splits_digits_as_in_training(smollm):
    """Two spaces before a digit are one token, since digits are set apart before words are looked for."""
    tokenizer = AutoTokenizer.from_pretrained(smollm.tokenizer_dir, local_files_only=True)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


@pytest.mark.slow
def test_gguf_file_of_the_user(smollm, tmp_path):
    """Its tokenizer is converted once into the cache; the folder of the file stays as it is."""
    own = tmp_path / "own" / "mine.gguf"
    own.parent.mkdir()
    own.symlink_to(smollm.weights)
    cache = tmp_path / "cache"
    files = locate(str(own), cache)
    assert (files.name, files.weights, files.eos_token_ids) == ("mine", own, (2,))
    assert files.tokenizer_dir.is_relative_to(cache / "tokenizers")
    stamp = files.tokenizer_dir.stat().st_mtime_ns
    assert locate(str(own), cache) == files
    assert files.tokenizer_dir.stat().st_mtime_ns == stamp
    assert list(own.parent.iterdir()) == [own]
