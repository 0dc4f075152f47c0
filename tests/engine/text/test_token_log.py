"""Returned tokens are delivered with the text they became, however it is cut and held back."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.outputs import FinishReason, OutputToken, TokenLogprobs
from engine.readouts import PromptLogprobs
from engine.request import Request, SamplingParams
from engine.text.detokenizer import AddTokens, Detokenizer, OpenStream
from engine.text.token_bytes import TokenPieces
from engine.text.token_log import TokenLog
from tests.engine.text.test_detokenizer import EOS, TEXTS, TOKENIZERS, byte_fallback, byte_level
from tests.engine.toy import EOS as TOY_EOS
from tests.engine.toy import reference, toy_logprobs
from tests.engine.toy_engine import CHARS, toy_engine

pieces_of = functools.cache(lambda name: TokenPieces(TOKENIZERS[name]()))


def told(token_id: int) -> TokenLogprobs:
    """Log-probabilities that name their token."""
    return TokenLogprobs(-float(token_id), ((token_id, -float(token_id)), (1, -9.0)))


def deltas_of(
    name: str,
    token_ids: list[int],
    *,
    cuts: list[int] = [],  # noqa: B006 (never changed)
    context: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
    skip_special: bool = True,
    hide_last: bool = False,
):
    """The deltas of a stream that tells its tokens, which come `cuts[i]` at a time."""
    detokenizer = Detokenizer(TOKENIZERS[name](), pieces_of(name))
    detokenizer.process([OpenStream(1, context, stop, include_stop, 0, skip_special, return_tokens=True)])
    results, rest, sizes = [], list(token_ids), list(cuts)
    while rest:
        size = sizes.pop(0) if sizes else 1
        chunk, rest = tuple(rest[:size]), rest[size:]
        finish = None if rest else FinishReason.STOP if hide_last else FinishReason.LENGTH
        logprobs = tuple(map(told, chunk))
        job = AddTokens(1, chunk, finish, None, hide_last and not rest, logprobs)
        results += detokenizer.process([job])
    return [result.delta for result in results]


def tokens_of(deltas) -> list[OutputToken]:
    return [token for delta in deltas for token in delta.tokens]


def shown_bytes(deltas) -> bytes:
    return b"".join(token.piece.data for token in tokens_of(deltas) if token.is_shown)


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_are_the_text(text, name, skip_special):
    tokenizer = TOKENIZERS[name]()
    context = tuple(tokenizer.encode("and").ids)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    for cuts in ([], [3] * 99, [99]):
        deltas = deltas_of(name, token_ids, cuts=cuts, context=context, skip_special=skip_special)
        assert shown_bytes(deltas) == "".join(delta.text for delta in deltas).encode()
        assert [token.piece.token_id for token in tokens_of(deltas)] == token_ids
        for token in tokens_of(deltas):
            assert (token.logprob, token.top[0][0]) == (-token.piece.token_id, token.piece)


@settings(max_examples=150)
@given(
    st.text("aé👋🏽한z", max_size=30),
    st.lists(st.integers(1, 9), max_size=20),
    st.sampled_from([(), ("zz",), ("a👋", "é")]),
    st.booleans(),
    st.sampled_from(["byte_level", "byte_fallback"]),
)
@example("aé", [], ("é",), False, "byte_level")
def test_every_prefix_of_the_deltas_is_aligned(text, cuts, stop, include_stop, name):
    """A token never leaves before its text, and no later than with the character that holds its last byte."""
    token_ids = TOKENIZERS[name]().encode("x" + text, add_special_tokens=False).ids
    context, token_ids = tuple(token_ids[:1]), token_ids[1:]
    if not token_ids:
        return
    deltas = deltas_of(name, token_ids, cuts=cuts, context=context, stop=stop, include_stop=include_stop)
    seen, data = "", b""
    for delta in deltas:
        seen += delta.text
        data += shown_bytes([delta])
        if delta.finish_reason is None:
            assert seen.encode().startswith(data), (seen, data)
            assert len(seen.encode()) - len(data) < 4, "only a token that ends in half a character is behind"
    if deltas[-1].stop_reason is None:
        assert data == seen.encode()
    else:
        assert data.startswith(seen.encode()), "a token that is cut is told as a whole"
        last = [token for token in tokens_of(deltas) if token.is_shown][-1:]
        assert not last or last[0].offset <= len(seen)
    assert sum(delta.num_tokens for delta in deltas) == len(tokens_of(deltas))
    before = b""
    for token in tokens_of(deltas):
        if token.is_shown:
            assert token.offset == len(before.decode(errors="ignore")), (token, before)
            before += token.piece.data


@settings(max_examples=150)
@given(st.lists(st.integers(0, 262), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=9))
def test_no_token_is_lost_whatever_the_bytes(token_ids, cuts):
    deltas = deltas_of("byte_level", token_ids, cuts=cuts)
    assert [token.piece.token_id for token in tokens_of(deltas)] == token_ids
    singly = deltas_of("byte_level", token_ids)
    assert tokens_of(deltas) == tokens_of(singly), "how tokens arrive does not show"


def test_offsets_count_characters():
    """A token that goes on with a character stands where the character does."""
    tokens = tokens_of(deltas_of("byte_level", byte_level().encode("né👋🏽!").ids))
    assert [(token.piece.data, token.offset) for token in tokens] == [
        (b"n", 0),
        *[(byte, 1) for byte in (b"\xc3", b"\xa9")],
        *[(part, 2) for part in (b"\xf0\x9f", b"\x91", b"\x8b")],
        *[(part, 3) for part in (b"\xf0\x9f", b"\x8f", b"\xbd")],
        (b"!", 4),
    ]


@pytest.mark.parametrize(
    ("context", "data", "text", "offsets"),
    [
        (b"a\xf0\x9f\x98", b"I", "\ufffdI", [1]),
        (b"a\xf0\x9f\x98", b"II", "\ufffdII", [1, 2]),
        (b"a\xf0\x9f\x98", b"\x80I", "\U0001f600I", [0, 1]),
        (b"a\x80", b"I", "I", [0]),
        (b"a", b"\xf0\x9fI", "\ufffdI", [0, 0, 1]),
        (b"a", b"I\xf0I", "I\ufffdI", [0, 1, 2]),
    ],
)
def test_offsets_after_part_of_a_character(context, data, text, offsets):
    """What a prompt began stands in the text, but is no token of it."""
    token_ids = {pieces_of("byte_level").piece(token_id).data: token_id for token_id in range(256)}

    def ids(data: bytes) -> list[int]:
        return [token_ids[bytes([byte])] for byte in data]

    deltas = deltas_of("byte_level", ids(data), context=tuple(ids(context)))
    assert "".join(delta.text for delta in deltas) == text
    assert [token.offset for token in tokens_of(deltas)] == offsets


def test_tokens_of_a_stop_string_are_returned_but_not_shown():
    token_ids = byte_level().encode("ab STOP cd").ids
    deltas = deltas_of("byte_level", token_ids, stop=("STOP",))
    assert "".join(delta.text for delta in deltas) == "ab "
    assert shown_bytes(deltas) == b"ab "
    hidden = [token for token in tokens_of(deltas) if not token.is_shown]
    assert b"".join(token.piece.data for token in hidden) == b"STOP"
    deltas = deltas_of("byte_level", token_ids, stop=("STOP",), include_stop=True)
    assert shown_bytes(deltas) == b"ab STOP"


@pytest.mark.parametrize("cuts", [[], [99]])
def test_the_token_that_ends_and_special_ones_are_not_shown(cuts):
    tokenizer = byte_level()
    eos = tokenizer.token_to_id(EOS)
    token_ids = [*tokenizer.encode("a").ids, eos, *tokenizer.encode("b").ids, eos]
    deltas = deltas_of("byte_level", token_ids, cuts=cuts, hide_last=True)
    assert [token.is_shown for token in tokens_of(deltas)] == [True, False, True, False]
    assert [token.is_listed for token in tokens_of(deltas)] == [True, True, True, False]
    assert sum(delta.num_tokens for delta in deltas) == 4
    deltas = deltas_of("byte_level", token_ids, cuts=cuts, hide_last=True, skip_special=False)
    assert shown_bytes(deltas) == f"a{EOS}b".encode()


def test_pieces_of_each_kind_of_decoder():
    level, fallback = TokenPieces(byte_level()), TokenPieces(byte_fallback())
    assert level.piece(byte_level().token_to_id("Ġa")).data == b" a"
    assert level.piece(byte_level().token_to_id("ðŁ")).data == b"\xf0\x9f"
    assert level.piece(99_999).data == b"", "an id without a token"
    assert fallback.piece(0xE2).data == b"\xe2"
    assert fallback.piece(byte_fallback().token_to_id("▁and")).data == b" and"
    for tokenizer, pieces in ((byte_level(), level), (byte_fallback(), fallback)):
        piece = pieces.piece(tokenizer.token_to_id(EOS))
        assert (piece.data, piece.is_special) == (EOS.encode(), True)
    metaspace = Tokenizer(models.WordLevel({"▁a": 0}, unk_token="▁a"))
    metaspace.decoder = decoders.Metaspace()
    metaspace.add_tokens([AddedToken("▁kept", special=False)])
    pieces = TokenPieces(metaspace)
    assert (pieces.piece(0).data, pieces.piece(1).data) == (b" a", "▁kept".encode())


def test_pieces_are_sorted_by_their_bytes():
    unusual = Tokenizer.from_str(byte_level().to_str())
    unusual.add_tokens(
        [AddedToken("not in the alphabet: é\n不", special=False), AddedToken("\x7f", special=False)]
    )
    for tokenizer in (byte_level(), byte_fallback(), unusual):
        pieces = TokenPieces(tokenizer)
        assert "by_bytes" in vars(pieces), "sorted where it is made, at start-up, not at first use"
        data, ids = pieces.by_bytes
        assert data == sorted(data)
        assert data == [pieces.piece(token_id).data for token_id in ids.tolist()]
        everything = tokenizer.get_vocab(with_added_tokens=True).values()
        assert set(ids.tolist()) == {token_id for token_id in everything if not pieces.is_special(token_id)}


def test_tokens_outside_the_byte_alphabet_are_their_own_text():
    words = Tokenizer(models.WordLevel({"Ġa": 0, "a b": 1, "不": 2, "\xad": 3, "ÿĀ": 4}, unk_token="a b"))
    words.decoder = decoders.ByteLevel()
    pieces = TokenPieces(words)
    assert [pieces.piece(token_id).data for token_id in range(5)] == [
        b" a", b"a b", "不".encode(), "\xad".encode(), b"\xff\x00",
    ]  # fmt: skip


@pytest.mark.parametrize("num_pages", [64, 12])
async def test_log_probabilities_go_through_the_engine(num_pages):
    """Each of several streams gets those of its own tokens, preempted or not, collected or not."""
    prompts = [[i, i + 1, i + 2] for i in range(5)]
    sampling = SamplingParams(max_tokens=24, logprobs=2, seed=0)
    async with toy_engine(num_pages=num_pages, overcommit=1.0) as engine:
        requests = [Request(str(i), tuple(p), sampling) for i, p in enumerate(prompts)]
        quiet = engine.submit(Request("quiet", (7, 7), SamplingParams(max_tokens=9)))
        ids = engine.submit(Request("ids", (8, 7), SamplingParams(max_tokens=9, seed=0), return_tokens=True))
        streams = [engine.submit(request) for request in requests]
        read = [[delta async for delta in stream] for stream in streams[:2]]
        read += [[await stream.collect()] for stream in streams[2:]]
        assert (await quiet.collect()).tokens == ()
        tokens = (await ids.collect()).tokens
        assert [(t.logprob, t.top) for t in tokens] == [(None, ())] * len(tokens)
        assert [t.piece.token_id for t in tokens] == reference([8, 7], 9)
        assert (engine.stats().preemptions_total > 0) == (num_pages == 12)
    for prompt, deltas in zip(prompts, read, strict=True):
        expected = reference(prompt, 24)
        tokens = tokens_of(deltas)
        assert [token.piece.token_id for token in tokens] == expected
        for token in tokens:
            assert token.piece.data == CHARS[token.piece.token_id].encode()
            logprob, top, _ = toy_logprobs(token.piece.token_id, 2)
            assert (token.logprob, token.rank) == (logprob, None)
            assert [(piece.token_id, value) for piece, value in token.top] == list(top)
            assert token.is_shown == (token.piece.token_id != TOY_EOS)


def check_prompt(tokens: tuple[OutputToken, ...], prompt: list[int], num_top: int) -> None:
    """The tokens of a prompt, each with what the toy model says; nothing comes before the first."""
    assert [token.piece.token_id for token in tokens] == prompt
    assert [token.offset for token in tokens] == list(range(len(prompt)))
    for number, token in enumerate(tokens):
        if number == 0:
            assert (token.logprob, token.top, token.rank) == (None, (), None)
            continue
        logprob, top, _ = toy_logprobs(token.piece.token_id, num_top)
        assert (token.logprob, token.rank) == (logprob, 1)
        assert [(piece.token_id, value) for piece, value in token.top] == list(top)


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
@pytest.mark.parametrize("num_pages", [64, 20])
async def test_prompt_tokens_are_returned_once(num_pages, max_tokens):
    """However they are cut into chunks, preempted, and found in the prefix cache by others."""
    prompts = [[(7 * i + j) % 90 for j in range(length)] for i, length in enumerate([1, 2, 37, 33, 36, 50])]
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    readouts = (PromptLogprobs(2),)
    async with toy_engine(num_pages=num_pages, token_budget=16, overcommit=1.0) as engine:
        for _ in range(2):
            requests = [Request(str(i), tuple(p), sampling, readouts=readouts) for i, p in enumerate(prompts)]
            streams = [engine.submit(request) for request in requests]
            read = [[delta async for delta in stream] for stream in streams[:3]]
            read += [[await stream.collect()] for stream in streams[3:]]
            for prompt, stream, deltas in zip(prompts, streams, read, strict=True):
                check_prompt(deltas[0].prompt_tokens, prompt, 2)
                assert all(delta.prompt_tokens == () for delta in deltas[1:])
                output = [token.piece.token_id for token in tokens_of(deltas)]
                assert output == reference(prompt, max_tokens)
                assert stream.num_output_tokens == len(output)
                assert deltas[-1].finish_reason is not None
                assert stream.num_cached_tokens == 0, "all of it is computed"
        known = engine.submit(Request("known", tuple(prompts[5]), SamplingParams(max_tokens=1)))
        await known.collect()
        assert known.num_cached_tokens == 48, "but left for others"
        assert (engine.stats().preemptions_total > 0) == (num_pages == 20 and max_tokens == 20)


async def test_samples_share_a_prompt_whose_tokens_one_returns():
    prompt = list(range(40))
    sampling = SamplingParams(max_tokens=5, seed=0)
    readouts = (PromptLogprobs(0),)
    async with toy_engine(token_budget=16) as engine:
        requests = [
            Request(str(i), tuple(prompt), sampling, readouts=() if i else readouts) for i in range(3)
        ]
        deltas = [await stream.collect() for stream in engine.submit_group(requests)]
        assert len({delta.text for delta in deltas}) == 1
        check_prompt(deltas[0].prompt_tokens, prompt, 0)
        assert engine.stats().cached_prompt_tokens_total == 2 * 39
        requests = [Request(str(i), tuple(prompt), sampling, readouts=readouts) for i in range(2)]
        for stream in engine.submit_group(requests):
            check_prompt((await stream.collect()).prompt_tokens, prompt, 0)
        nothing = SamplingParams(max_tokens=0)
        for stream in engine.submit_group([Request(str(i), tuple(prompt), nothing) for i in range(3)]):
            assert await stream.collect() == ("", 0, FinishReason.LENGTH, None, (), ())


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["né👋🏽 and!", " and"])
def test_offsets_in_a_prompt_count_characters(name, text):
    tokenizer = TOKENIZERS[name]()
    eos = tokenizer.token_to_id(EOS)
    token_ids = (eos, *tokenizer.encode(text).ids)
    log = TokenLog(TokenPieces(tokenizer), skip_special_tokens=True)
    log.add_prompt_tokens(token_ids[:3], None)
    log.add_prompt_tokens(token_ids[3:], None)
    tokens = log.take_prompt()
    assert log.take_prompt() == ()
    assert [token.is_shown for token in tokens] == [False] + [True] * (len(tokens) - 1)
    data = b""
    for token in tokens:
        before = data.decode(errors="ignore")
        assert token.offset == len(before if name == "byte_level" else before[1:]), before
        data += token.piece.data if token.is_shown else b""
    whole = tokenizer.decode(list(token_ids))
    assert data.decode().removeprefix(" " if name == "byte_fallback" else "") == whole
