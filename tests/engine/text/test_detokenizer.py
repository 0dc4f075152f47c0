"""Streamed text, joined, equals the text decoded at once, however the tokens arrive."""

import functools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.outputs import FinishReason
from engine.text.detokenizer import AddTokens, CloseStream, Detokenizer, OpenStream
from engine.text.token_bytes import TokenPieces

TEXTS = [
    "plain words and numbers 12345",
    "emoji 👩‍👩‍👧‍👦 flags 🇨🇭🇩🇪 and skin 👋🏽 tones",
    "你好，世界 こんにちは 안녕하세요",
    "combining e\u0301 a\u0308 ก็ नमस्ते",
    "control <|end|> inside <|end|>",
    "tabs\tand\nlines\r\n  spaces   ",
    "\ufffd a real replacement mark \ufffd\ufffd",
]
EOS = "<|end|>"


@functools.cache
def byte_level() -> Tokenizer:
    """A GPT-2 style tokenizer: one token per byte, some merges, one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges = []
    for left, right in (("h", "e"), ("Ġ", "a"), ("n", "d"), ("ð", "Ł"), ("l", "l"), ("o", "r")):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """A Llama-2 style tokenizer: words with a leading space mark, every other byte a token of its own."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz<|>", "▁and", "▁emoji", "▁w", "or", "ds"]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [("o", "r"), ("d", "s")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def stream(
    tokenizer: Tokenizer,
    token_ids: list[int],
    *,
    context: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    skip_special: bool = True,
    pieces: list[int] | None = None,
    finish: FinishReason = FinishReason.LENGTH,
):
    """Send tokens through a detokenizer, `pieces[i]` at a time; returns the list of Decoded."""
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    detokenizer.process([OpenStream(1, context, stop, include_stop, min_tokens, skip_special)])
    results, rest, sizes = [], list(token_ids), list(pieces or [])
    while rest:
        size = sizes.pop(0) if sizes else 1
        chunk, rest = rest[:size], rest[size:]
        results += detokenizer.process([AddTokens(1, tuple(chunk), None if rest else finish)])
    assert detokenizer.num_streams == 0, "the stream ended"
    return results


def joined(results) -> str:
    return "".join(result.delta.text for result in results)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_stream_equals_the_whole(name, skip_special, text):
    tokenizer = TOKENIZERS[name]()
    context = tuple(tokenizer.encode("and").ids)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode([*context, *token_ids], skip_special_tokens=skip_special)
    expected = whole[len(tokenizer.decode(list(context))) :]
    for seed in range(5):
        pieces = [random.Random(seed).randint(1, 4) for _ in token_ids]
        results = stream(tokenizer, token_ids, context=context, skip_special=skip_special, pieces=pieces)
        assert joined(results) == expected
        assert sum(result.delta.num_tokens for result in results) == len(token_ids)
        assert results[-1].num_output_tokens == len(token_ids)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 262), min_size=1, max_size=80), st.booleans())
@example([0xE2, 0x82] * 30, True)
@example([128] * 70, True)
def test_any_bytes_joined_equal_the_whole(token_ids, skip_special):
    tokenizer = byte_level()
    results = stream(tokenizer, token_ids, skip_special=skip_special)
    assert joined(results) == tokenizer.decode(token_ids, skip_special_tokens=skip_special)


@settings(max_examples=100)
@given(st.text("aé👋🏽한 \u0301z", min_size=1, max_size=60), st.lists(st.integers(1, 40), max_size=20))
@example("éaa🏽🏽é🏽🏽", [1, 4, 4, 1, 3, 2, 4])
@example("한" * 40, [4] * 20)
def test_any_text_survives_byte_fallback(text, pieces):
    tokenizer = byte_fallback()
    context = tuple(tokenizer.encode("and").ids)
    token_ids = [token for char in text for token in tokenizer.encode("x" + char).ids[2:]]
    if not token_ids:
        return
    whole = tokenizer.decode([*context, *token_ids])
    assert joined(stream(tokenizer, token_ids, context=context, pieces=pieces)) == whole[3:]


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 262), min_size=1, max_size=12),
    st.lists(st.integers(0, 262), min_size=1, max_size=12),
    st.booleans(),
)
def test_a_character_begun_in_the_prompt_belongs_to_the_output(prompt, token_ids, skip_special):
    """A character that a prompt begins is shown once, whole or not; other marks at its end are its own."""
    tokenizer = byte_level()
    text = tokenizer.decode(prompt, skip_special_tokens=skip_special)
    settled = TokenPieces(tokenizer).settled(prompt, text, skip_special_tokens=skip_special)
    results = stream(tokenizer, token_ids, context=tuple(prompt[-6:]), skip_special=skip_special)
    whole = tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip_special)
    assert settled + joined(results) == whole


@pytest.mark.parametrize(
    ("prompt", "more", "settled", "told"),
    [
        (b"a\xf0\x9f\x98", b"i", "a", "\ufffd\ufffd\ufffdi"),
        (b"a\xf0\x9f\x98", b"\x80", "a", "\U0001f600"),
        (b"a\xc3\xa9\xf0\x9f\x98", b"\x80b", "aé", "\U0001f600b"),
        (b"a\xc3\xa9", b"b", "aé", "b"),
        (b"a\xef\xbf\xbd", b"b", "a\ufffd", "b"),
        (b"a\x80", b"b", "a\ufffd", "b"),
    ],
)
def test_a_character_begun_in_the_prompt_with_byte_fallback(prompt, more, settled, told):
    tokenizer = byte_fallback()
    prompt_ids, token_ids = (
        [tokenizer.token_to_id(chr(byte) if byte < 128 else f"<0x{byte:02X}>") for byte in data]
        for data in (prompt, more)
    )
    text = tokenizer.decode(prompt_ids)
    assert TokenPieces(tokenizer).settled(prompt_ids, text, skip_special_tokens=True) == settled
    assert joined(stream(tokenizer, token_ids, context=tuple(prompt_ids))) == told


def test_no_delta_ever_shows_half_a_character():
    tokenizer = byte_level()
    results = stream(tokenizer, tokenizer.encode("👩‍👩‍👧 a 🇨🇭 b").ids)
    assert all("\ufffd" not in result.delta.text for result in results)


def test_invalid_bytes_are_shown_before_the_end():
    tokenizer = byte_level()
    results = stream(tokenizer, tokenizer.encode("a").ids + [130] * 500)
    assert len(results) > 20, "endless invalid bytes are not held back until the end"


def test_a_window_stays_short():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    detokenizer.process([OpenStream(1, (), (), False, 0, True)])
    for token_id in tokenizer.encode("words and 👋🏽 words " * 40).ids:
        detokenizer.process([AddTokens(1, (token_id,))])
        assert len(detokenizer._streams[1].window) <= 40


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_across_token_borders(name, include_stop, size):
    tokenizer = TOKENIZERS[name]()
    token_ids = tokenizer.encode("words and more emoji words").ids
    results = stream(
        tokenizer, token_ids, stop=("re emo", "zzz"), include_stop=include_stop, pieces=[size] * 40
    )
    whole = tokenizer.decode(token_ids)
    cut = whole.index("re emo") + (len("re emo") if include_stop else 0)
    assert joined(results) == whole[:cut]
    assert results[-1].delta.finish_reason is FinishReason.STOP
    assert results[-1].delta.stop_reason == "re emo"
    used = results[-1].num_output_tokens
    assert "re emo" in tokenizer.decode(token_ids[:used])
    assert "re emo" not in tokenizer.decode(token_ids[: used - 1]), "the count names the token it ended at"


def test_no_piece_of_a_stop_string_leaks():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("abc STO STOP").ids
    seen = ""
    for result in stream(tokenizer, token_ids, stop=("STOP",)):
        seen += result.delta.text
        assert "abc STO STOP"[: len(seen)] == seen
        assert not seen.endswith("STO "[:4].strip()) or seen == "abc STO" or "STO " in seen
    assert seen == "abc STO "


def test_a_false_start_of_a_stop_string_is_shown_at_the_end():
    tokenizer = byte_level()
    assert joined(stream(tokenizer, tokenizer.encode("abc STO").ids, stop=("STOP",))) == "abc STO"


@settings(max_examples=150)
@given(
    st.text("ab", min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_cut_like_a_search_in_the_whole(text, stop):
    tokenizer = byte_level()
    token_ids = tokenizer.encode(text).ids
    results = stream(tokenizer, token_ids, stop=tuple(stop))
    # The first stop string to be complete wins; of several complete at one token, the one that begins first.
    ends = [
        (end, min(text[:end].find(s) for s in stop if s in text[:end]))
        for end in range(1, len(text) + 1)
        if any(s in text[:end] for s in stop)
    ]
    assert joined(results) == (text[: ends[0][1]] if ends else text)


def test_min_tokens_lets_an_early_stop_string_pass():
    tokenizer = byte_level()
    token_ids = tokenizer.encode("abXabXab").ids
    assert joined(stream(tokenizer, token_ids, stop=("X",), min_tokens=4)) == "abXab"


def test_the_end_token_counts_but_is_not_shown():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    eos = tokenizer.token_to_id(EOS)
    ids = tuple(tokenizer.encode("hi").ids)
    detokenizer.process([OpenStream(1, (), (), False, 0, False)])
    results = detokenizer.process([AddTokens(1, (*ids, eos), FinishReason.STOP, None, hide_last=True)])
    assert joined(results) == "hi"
    assert results[-1].num_output_tokens == len(ids) + 1


def test_streams_share_a_step_and_do_not_mix():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    texts = ["alpha 👋", "beta é", "gamma <|end|> x"]
    flags = [True, True, False]
    detokenizer.process(
        [OpenStream(i, (), ("zz",) if i else (), False, 0, flag) for i, flag in enumerate(flags)]
    )
    queues = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    seen = ["", "", ""]
    while any(queues):
        jobs = [
            AddTokens(i, (q.pop(0),), None if q else FinishReason.LENGTH) for i, q in enumerate(queues) if q
        ]
        for result in detokenizer.process(jobs):
            seen[result.sequence_id] += result.delta.text
    assert seen == texts


def test_a_closed_stream_is_forgotten_and_late_tokens_are_ignored():
    detokenizer = Detokenizer(byte_level(), TokenPieces(byte_level()))
    detokenizer.process([OpenStream(1, (), (), False, 0, True)])
    assert detokenizer.process([CloseStream(1), AddTokens(1, (5,))]) == []
    assert detokenizer.num_streams == 0


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_stop_string_matches_the_control_token_it_spells(name, include_stop, skip_special, size):
    tokenizer = TOKENIZERS[name]()
    eos = tokenizer.token_to_id(EOS)
    ids = tokenizer.encode("and ab", add_special_tokens=False).ids
    options = {"stop": ("zz", EOS), "include_stop": include_stop, "skip_special": skip_special}
    results = stream(tokenizer, [*ids, eos, *ids], pieces=[size] * 40, **options)
    assert joined(results) == tokenizer.decode(ids) + (EOS if include_stop else "")
    last = results[-1]
    assert (last.delta.finish_reason, last.delta.stop_reason) == (FinishReason.STOP, EOS)
    assert last.num_output_tokens == len(ids) + 1


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_token_waits_for_min_tokens(name):
    tokenizer = TOKENIZERS[name]()
    eos = tokenizer.token_to_id(EOS)
    [a] = tokenizer.encode("b", add_special_tokens=False).ids[-1:]
    results = stream(tokenizer, [a, eos, a, eos, a], stop=(EOS,), min_tokens=3)
    assert (results[-1].num_output_tokens, results[-1].delta.stop_reason) == (4, EOS)


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_end_token_is_the_stop_string_that_spells_it(include_stop):
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    ids = (*tokenizer.encode("hi").ids, tokenizer.token_to_id(EOS))
    detokenizer.process([OpenStream(1, (), (EOS,), include_stop, 0, True)])
    [result] = detokenizer.process([AddTokens(1, ids, FinishReason.STOP, None, hide_last=True)])
    assert result.delta.text == "hi" + (EOS if include_stop else "")
    assert result.delta.stop_reason == EOS


def test_bytes_before_a_stop_token_are_shown_and_its_own_token_is_not():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, TokenPieces(tokenizer))
    half = tokenizer.encode("é", add_special_tokens=False).ids[:1]
    ids = (*tokenizer.encode("hi").ids, *half, tokenizer.token_to_id(EOS), *half)
    detokenizer.process([OpenStream(1, (), (EOS,), False, 0, False, return_tokens=True)])
    [result] = detokenizer.process([AddTokens(1, ids)])
    assert result.delta.text == "hi\ufffd"
    assert [token.piece.token_id for token in result.delta.tokens] == list(ids[:-1])
    assert [token.is_shown for token in result.delta.tokens] == [True, True, True, False]
