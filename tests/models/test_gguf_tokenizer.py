"""Tokenizers built from GGUF metadata, against the splits of the models' own tokenizers and sentencepiece.

Covers models/gguf/tokenizer.py and models/gguf/pre_tokenizers.py.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from models.end_tokens import end_token_ids, ends_of_turn
from models.errors import ModelError
from models.gguf.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer
from models.gguf.tokenizer import build_tokenizer

TEXT = "It's  DON'T XmlHttp\n\n  a1234 é日本 x+=1;\n"
SPLITS = {
    "gpt-2": "It|'s| | DON|'|T| XmlHttp|\n\n | a|1234| é日本| x|+=|1|;|\n",
    "smollm": "It|'s| | DON|'|T| XmlHttp|\n\n | a|1|2|3|4| é日本| x|+=|1|;|\n",
    "llama-bpe": "It|'s| | DON|'T| XmlHttp|\n\n| | a|123|4| é日本| x|+=|1|;\n",
    "qwen2": "It|'s| | DON|'T| XmlHttp|\n\n| | a|1|2|3|4| é日本| x|+=|1|;\n",
    "seed-coder": "It|'s| | DON|'T| XmlHttp|\n\n| | a|1|2|3|4| é日本| x|+=|1|;|\n",
    "tekken": "It|'s| | DON|'T| Xml|Http|\n\n| | a|1|2|3|4| é日本| x|+=|1|;\n",
    "gpt-4o": "It's| | DON'T| Xml|Http|\n\n| | a|123|4| é日本| x|+=|1|;\n",
    "deepseek-coder": "It|'|s| | DON|'|T| XmlHttp|\n|\n| | a|1|2|3|4| é|日本| x|+=|1|;|\n",
}
WORDS = st.text(st.sampled_from("abZ '\u2019sStT\n\r\t 019é日ǅʰ́🙂+_.,/\u00a0٣Ⅷ"), max_size=30)
BYTES = pre_tokenizers.ByteLevel.alphabet()


def cut(text: str, *patterns: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_has_a_reference_split(name):
    kind = next(known for known in SPLITS if PRE_TOKENIZERS[known].patterns == PRE_TOKENIZERS[name].patterns)
    assert cut(TEXT, *pre_tokenizer(name).patterns) == SPLITS[kind].split("|")
    assert "".join(cut(TEXT, *pre_tokenizer(name).patterns)) == TEXT


@settings(max_examples=300)
@given(WORDS)
def test_splits_equal_those_of_the_libraries(text):
    def byte_level(*before):
        own = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        return [text[slice(*place)] for _, place in own.pre_tokenize_str(text)]

    assert cut(text, *pre_tokenizer("gpt-2").patterns) == byte_level()
    assert cut(text, *pre_tokenizer("smollm").patterns) == byte_level(pre_tokenizers.Digits(True))
    assert cut(text, *pre_tokenizer("qwen2").patterns) == cut(text, PRETOKENIZE_REGEX)


def test_splits_equal_those_of_transformers():
    """Its table is younger than the oldest version that is supported."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    generator = random.Random(0)
    texts = ["".join(generator.choices("aB '\u2019sT\n\t 019é日ǅʰ́🙂+_./", k=30)) for _ in range(200)]
    shared = mapping.GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()
    assert {"llama-bpe", "tekken", "qwen2", "gpt-4o", "smaug-bpe"} <= shared
    for name in shared:
        for text in (TEXT, *texts):
            theirs = cut(text, mapping.GGUF_PRE_TOKENIZER_SPLITS[name])
            assert cut(text, *pre_tokenizer(name).patterns) == theirs, name


def byte_level(pre="llama-bpe", **changes):
    """Metadata of a small vocabulary: bytes, `ab`, `abc` that no merge reaches, and control tokens."""
    control = ["<|begin|>", "<|end_of_text|>", "<|eot_id|>", "<tool>"]
    tokens = [*sorted(BYTES), "ab", "abc", *control]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(BYTES) + 2) + [3, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end_of_text|>"),
        "tokenizer.chat_template": "{{ messages }}<|eot_id|>",
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def pieces(metadata, text):
    tokenizer = build_tokenizer(metadata)
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


def test_words_that_no_merge_reaches_are_one_token():
    assert pieces(byte_level(add_bos_token=False), "abc") == ["abc"]
    assert pieces(byte_level("tekken", add_bos_token=False), "abc") == ["abc"]
    assert pieces(byte_level("qwen2"), "abc") == ["ab", "c"]


@pytest.mark.parametrize(
    ("pre", "given", "is_added"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_where_the_file_or_its_pre_tokenizer_says_so(pre, given, is_added):
    found = pieces(byte_level(pre, **given), "ab")
    assert found == (["<|begin|>", "ab"] if is_added else ["ab"])


def test_eos_is_added_where_the_file_says_so():
    assert pieces(byte_level(add_eos_token=True), "ab") == ["<|begin|>", "ab", "<|end_of_text|>"]


def test_a_prefix_space_of_byte_level_tokens():
    assert pieces(byte_level("qwen2", add_space_prefix=True), "ab") == ["Ġ", "ab"]
    assert pieces(byte_level("qwen2", add_space_prefix=False), "ab") == ["ab"]


def test_control_and_user_defined_tokens_stay_whole():
    tokenizer = build_tokenizer(byte_level("qwen2"))
    ids = tokenizer.encode("ab<|eot_id|>ab<tool>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["ab", "<|eot_id|>", "ab", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abab<tool>"
    assert tokenizer.eos_token == "<|end_of_text|>"


@pytest.mark.parametrize("pre", ["", "default", "viking", "no-such"])
def test_an_unknown_pre_tokenizer_is_refused_by_name(pre):
    with pytest.raises(ModelError, match=f"pre-tokenizer '{pre}'" if pre else "names no pre-tokenizer"):
        build_tokenizer(byte_level(pre))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "of the kind 't5'; supported: gpt2, llama"),
        ({"model": None}, "of the kind None"),
        ({"tokens": [], "token_type": []}, "empty"),
        ({"tokens": ["a", "a"], "token_type": None}, "twice"),
        ({"merges": ["a nowhere"]}, "cannot be read"),
        ({"token_type": [1]}, r"token_type is not a list of \d+ types, one for each token"),
        ({"tokens": None}, r"the metadata has no list tokenizer\.ggml\.tokens"),
        ({"tokens": 7}, r"the metadata has no list tokenizer\.ggml\.tokens"),
        ({"model": "llama", "merges": None}, "neither merges nor a score"),
    ],
)
def test_what_makes_no_tokenizer_is_one_sentence(changes, message):
    with pytest.raises(ModelError, match=message):
        build_tokenizer(byte_level(**changes))


def test_several_chat_templates():
    metadata = byte_level() | {"tokenizer.chat_template.tool_use": "tools"}
    assert build_tokenizer(metadata).chat_template == {
        "default": metadata["tokenizer.chat_template"],
        "tool_use": "tools",
    }
    assert build_tokenizer(byte_level()).chat_template == metadata["tokenizer.chat_template"]


def test_a_turn_ends_with_the_control_token_of_the_template(tmp_path):
    """The declared eos is the end of a text; chats end with <|eot_id|>."""
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert ends_of_turn(metadata) == [tokens.index("<|eot_id|>")]
    assert ends_of_turn(metadata | {"tokenizer.chat_template": "{{ messages }}"}) == []
    assert ends_of_turn(byte_level(token_type=[1] * len(tokens))) == []
    assert ends_of_turn({}) == []
    several = {
        "tokenizer.ggml.tokens": ["<|end|>", "<|call|>", "<|return|>"],
        "tokenizer.ggml.token_type": [3] * 3,
    }
    template = "<|call|><|return|><|end|>"
    assert ends_of_turn({**several, "tokenizer.chat_template": template}) == [0, 1, 2]
    channels = {**several, "tokenizer.chat_template": "<|channel|>" + template}
    assert ends_of_turn(channels) == [1, 2], "<|end|> ends a message, not the turn"
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert end_token_ids(tmp_path, len(tokens), eos, ends_of_turn(metadata)) == (eos, eos + 1)


CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "a dog and a fox, the fox and the dog: over and over",
    "  two  spaces   and three",
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A sentencepiece model trained on a few lines."""
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = str(tmp_path_factory.mktemp("spm") / "tiny")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_prefix=prefix,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def sentencepiece_metadata(reference, **changes):
    ids = range(reference.get_piece_size())
    kinds = [
        2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": reference.unk_id(),
        "tokenizer.ggml.bos_token_id": reference.bos_id(),
        "tokenizer.ggml.eos_token_id": reference.eos_id(),
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does(reference):
    tokenizer = build_tokenizer(sentencepiece_metadata(reference))
    generator = random.Random(0)
    words = [*" ".join(CORPUS).split(), " ", "  ", "\n", "é", "日本", "xyz", "1"]
    for _ in range(300):
        text = "".join(generator.choices(words, k=8))
        ids = tokenizer.encode(text)
        assert ids == [reference.bos_id(), *reference.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids)


def test_the_prefix_space_and_bos_of_sentencepiece_follow_the_file(reference):
    metadata = sentencepiece_metadata(reference, add_space_prefix=False, add_bos_token=False)
    tokenizer = build_tokenizer(metadata)
    with_prefix = build_tokenizer(sentencepiece_metadata(reference, add_bos_token=False))
    assert tokenizer.encode(" the") == with_prefix.encode("the")
    assert tokenizer.encode("the") != with_prefix.encode("the")
    for text in ("the fox", " the fox", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_control_tokens_of_phi3_take_the_white_space_after_them(reference, architecture):
    """As its published tokenizer has it, but for <unk>, <s> and <|endoftext|>."""
    metadata = sentencepiece_metadata(reference, add_bos_token=False) | {"general.architecture": architecture}
    added = ["<|user|>", "<|endoftext|>"]
    metadata["tokenizer.ggml.tokens"] += added
    metadata["tokenizer.ggml.scores"] += [0.0] * len(added)
    metadata["tokenizer.ggml.token_type"] += [3] * len(added)
    tokenizer = build_tokenizer(metadata)

    def text_between(control):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(f"{control}  the"))
        assert tokens[0] == control
        return "".join(tokens[1:])

    assert text_between("<|user|>") == ("▁the" if architecture == "phi3" else "▁▁▁the")
    assert text_between("<|endoftext|>") == "▁▁▁the"
