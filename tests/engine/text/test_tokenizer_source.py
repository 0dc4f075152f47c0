"""A tokenizer that needs no transformers is what transformers reads from the same files."""

import inspect
import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import ModelError
from engine.text.chat_template import RESERVED_VARIABLES
from engine.text.tokenizer_source import read_source
from tests.engine.text.test_detokenizer import EOS, byte_level

TEMPLATES = [None, "{{ a }}", {"default": "d", "tool_use": "t"}, {"rag": "r"}]


@pytest.mark.parametrize("template", TEMPLATES, ids=["none", "one", "two", "no default"])
def test_plain_files_are_read_as_by_transformers(tmp_path, template):
    saved = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS, pad_token=EOS)
    saved.chat_template = template
    saved.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = read_source(tmp_path)
    assert ours.hf is None, "it was read with transformers"
    assert ours.special_tokens == theirs.special_tokens_map == {"eos_token": EOS, "pad_token": EOS}
    assert ours.chat_template == theirs.chat_template == template
    assert ours.backend.to_str() == theirs.backend_tokenizer.to_str()


def test_the_default_models_tokenizer_is_plain(smollm):
    theirs = AutoTokenizer.from_pretrained(smollm.tokenizer_dir)
    ours = read_source(smollm.tokenizer_dir)
    assert ours.hf is None
    assert (ours.special_tokens, ours.chat_template) == (theirs.special_tokens_map, theirs.chat_template)
    assert ours.backend.to_str() == theirs.backend_tokenizer.to_str()


def test_plain_files_do_not_import_transformers(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS).save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path; from engine.text.tokenizer import Tokenizer; "
        f"Tokenizer(Path({str(tmp_path)!r})); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stdout


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"model_type": "llama"}),
        ("tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", "add_bos_token": True}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "TokenizersBackend", "eos_token": {"content": EOS, "__type": "AddedToken"}},
        ),
    ],
)
def test_other_files_are_read_by_transformers(tmp_path, file, content):
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS).save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    assert read_source(tmp_path).hf is not None


def test_a_broken_file_is_an_error_that_names_the_folder(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token=EOS).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=f"No usable tokenizer in {tmp_path}"):
        read_source(tmp_path)


def test_reserved_names_are_those_that_transformers_uses():
    names = set(PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES)
    for call in (PreTrainedTokenizerFast.apply_chat_template, render_jinja_template):
        names |= inspect.signature(call).parameters.keys()
    assert names - {"tools", "documents"} <= RESERVED_VARIABLES
