"""Grammars are compiled in threads, cached, and their masks are exact."""

import asyncio
import gc
import json
import random
import threading

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

import engine.constraints.grammar as room
from engine.constraint import MatchState
from engine.constraints.grammar import GrammarCompiler, Vocabulary, compile_grammar
from engine.errors import Draining, InvalidRequest, QueueFull
from engine.request import Grammar
from tests.engine.tiny_engine import EOS, allowed, tiny_tokenizer, tiny_vocabulary


async def test_grammars_are_compiled_once_and_cached(compiler, monkeypatch):
    compiled = []
    translate = room.translate
    monkeypatch.setattr(room, "translate", lambda *args: compiled.append(args[0]) or translate(*args))
    grammar = Grammar("choice", '["a"]', param="one")
    await asyncio.gather(*(compiler.compile(grammar) for _ in range(5)))
    await compiler.compile(Grammar("choice", '["a"]', param="two", label="other"))
    assert len(compiled) == 1, "a name makes no difference"
    for i in range(room.MAX_KEPT_GRAMMARS):
        await compiler.compile(Grammar("choice", f'["{i}"]'))
    await compiler.compile(grammar)
    assert len(compiled) == room.MAX_KEPT_GRAMMARS + 2


async def test_slow_grammars_are_refused(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(room, "translate", lambda *args: gate.wait())
    compiler = GrammarCompiler(tiny_vocabulary(), compile_seconds=0.01)
    with pytest.raises(InvalidRequest, match="not ready"):
        await compiler.compile(Grammar("json_object"))
    gate.set()
    compiler.close()


async def test_waiting_for_other_grammars_is_reported_as_a_full_queue(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(room, "translate", lambda *args: gate.wait())
    compiler = GrammarCompiler(tiny_vocabulary(), compile_seconds=0.05)
    slow = [Grammar("choice", json.dumps([f"slow {n}"])) for n in range(room.NUM_THREADS)]
    results = await asyncio.gather(
        *(compiler.compile(grammar) for grammar in [*slow, Grammar("choice", '["a"]')]),
        return_exceptions=True,
    )
    gate.set()
    compiler.close()
    assert [type(result) for result in results] == [InvalidRequest] * room.NUM_THREADS + [QueueFull]
    assert results[-1].retry_after_seconds >= 1


@pytest.fixture
def gate(monkeypatch):
    """Nothing is compiled before it is set; `began` are the grammars whose turn it was."""
    gate, translate = threading.Event(), room.translate
    gate.began = []
    monkeypatch.setattr(
        room,
        "translate",
        lambda grammar, names: gate.began.append(grammar) or (gate.wait(10) and translate(grammar, names)),
    )
    yield gate
    gate.set()


def numbered(count: int, name: str = "") -> list[Grammar]:
    return [Grammar("choice", json.dumps([f"{name}{n}"])) for n in range(count)]


async def test_the_number_of_waiting_grammars_is_bounded(compiler, gate):
    waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in numbered(room.MAX_JOBS)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await compiler.compile(Grammar("choice", '["one more"]'))
    waiting.append(asyncio.create_task(compiler.compile(numbered(1)[0])))  # who asks for one of them may wait
    gate.set()
    assert all(await asyncio.gather(*waiting))
    assert await compiler.compile(Grammar("choice", '["one more"]'))


async def test_grammars_of_cancelled_callers_are_not_compiled(compiler, gate):
    slow = numbered(room.NUM_THREADS, "slow")
    shared, left, late = numbered(3)
    tasks = [
        asyncio.create_task(compiler.compile(grammar)) for grammar in (*slow, shared, shared, left, late)
    ]
    await asyncio.sleep(0)
    for leaver in (tasks[-4], tasks[-2]):
        leaver.cancel()
    await asyncio.wait([tasks[-4], tasks[-2]])
    gate.set()
    assert await tasks[-3] and await tasks[-1]
    assert set(gate.began) == {*slow, shared, late}
    assert await compiler.compile(left), "it begins anew"


async def test_a_running_job_is_shared_whatever_else_is_compiled(compiler, monkeypatch):
    gate, began, translate = threading.Event(), [], room.translate

    def hold_the_first(grammar, names):
        began.append(grammar)
        return gate.wait(10) and translate(grammar, names) if grammar == first else translate(grammar, names)

    monkeypatch.setattr(room, "translate", hold_the_first)
    first = Grammar("json_object")
    waits = asyncio.create_task(compiler.compile(first))
    for grammar in numbered(room.MAX_KEPT_GRAMMARS + 1):
        await compiler.compile(grammar)
    joins = asyncio.create_task(compiler.compile(first))
    await asyncio.sleep(0)
    gate.set()
    assert await waits is await joins
    assert began.count(first) == 1


async def test_grammars_that_failed_leave_nothing_behind(compiler):
    def ours() -> int:
        gc.collect()
        return sum(type(thing) is Grammar and thing.source == "(" for thing in gc.get_objects())

    for _ in range(10):
        asked = [compiler.compile(Grammar("regex", "(")) for _ in range(10)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} == {InvalidRequest}
    del asked, results
    await asyncio.sleep(0)  # the loop itself holds what it ran last
    assert ours() == 0


async def test_waiting_callers_get_an_error_when_the_compiler_closes(compiler, gate):
    waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in numbered(room.NUM_THREADS + 1)]
    await asyncio.sleep(0)
    compiler.close()
    with pytest.raises(Draining):
        await waiting[-1]
    with pytest.raises(Draining):
        await compiler.compile(Grammar("choice", '["too late"]'))
    gate.set()
    assert all(await asyncio.gather(*waiting[:-1]))


async def test_a_panic_of_the_compiler_becomes_an_error(compiler, monkeypatch, caplog):
    class Panic(BaseException):
        """What a fault in Rust looks like."""

    def fail(grammar, names):
        raise Panic

    monkeypatch.setattr(room, "translate", fail)
    with pytest.raises(InvalidRequest, match="the compiler failed"):
        await compiler.compile(Grammar("json_object"))
    assert "json_object" in caplog.text


async def test_a_caller_that_leaves_takes_nothing_from_the_others(compiler, monkeypatch):
    gate, translate = threading.Event(), room.translate
    monkeypatch.setattr(room, "translate", lambda *args: gate.wait() and translate(*args))
    first, second = (asyncio.create_task(compiler.compile(Grammar("json_object"))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await second


async def test_a_tokenizer_that_cannot_be_read_allows_no_grammar():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder"):
        Vocabulary(tokenizer, ())
    with pytest.raises(InvalidRequest, match="tokenizer"):
        await GrammarCompiler(None).compile(Grammar("json_object"))


async def test_a_tokenizer_whose_decoder_changes_text_is_refused():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("a", "c")]
    )
    with pytest.raises(ValueError, match="decode"):
        Vocabulary(tokenizer, ())


async def test_byte_fallback_tokenizers_are_understood():
    vocab = {"<unk>": 0, "</s>": 1, "▁a": 2, "▁": 3, "b": 4, "ä": 5, "<0xC3>": 6, "<0xA4>": 7, "a": 8}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    compiler = GrammarCompiler(Vocabulary(tokenizer, (1,)))
    matcher = (await compiler.compile(Grammar("regex", "b aä"))).start()

    steps = [allowed(matcher, *new)[0] for new in ((), (4,), (2,), (5,), ())]
    assert steps == [{4}, {2}, {5}, set(), set()]
    compiler.close()


async def test_a_mask_allows_exactly_what_the_grammar_does(compiler):
    """Every token that may come is followed, and its mask compared with a plain search of the language.

    Where one text is left llguidance wants it spelled as the tokenizer does.
    """
    languages = [text.encode() for text in ("trutrue", "tä10", "true", "null")]
    grammar = await compiler.compile(Grammar("choice", json.dumps([text.decode() for text in languages])))
    tokenizer = tiny_vocabulary().tokenizer
    data = [tokenizer.decode_bytes([token_id]) for token_id in range(EOS)]
    ended, num_seen = set(), 0
    paths: list[tuple[int, ...]] = [()]
    while paths:
        path = paths.pop()
        num_seen += 1
        assert num_seen < 200, "the masks let through more than the language holds"
        spelled = b"".join(data[token_id] for token_id in path)
        found, state = allowed(grammar.start(), *path)
        rests = [text[len(spelled) :] for text in languages if text.startswith(spelled)]
        if len(rests) == 1:
            expected = set(tokenizer.tokenize_bytes(rests[0])[:1])
        else:
            expected = {
                token_id
                for token_id, piece in enumerate(data)
                if piece and any(rest.startswith(piece) for rest in rests)
            }
        assert found - {EOS} == expected, spelled
        may_end = spelled in languages
        assert state is (MatchState.MAY_STOP if may_end else MatchState.MUST_CONTINUE), spelled
        assert may_end or EOS not in found, spelled
        if may_end:
            ended.add(spelled)
        paths += [(*path, token_id) for token_id in expected]
    assert ended == set(languages)


names = st.text(alphabet='ab"\\ä\n', min_size=1, max_size=3)
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": "ä"}, {"enum": [1, "x", None]}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.sampled_from(["^[a-c]{1,3}$", "^(ja|nein)$", "^[ä-ö]$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
)


def compound(inner):
    """Schemas made of others."""
    arrays = st.builds(
        lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    objects = st.builds(
        lambda properties, num_required: {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 3),
    )
    return st.one_of(
        arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
    )


@settings(max_examples=40)
@given(wanted=st.recursive(leaves, compound, max_leaves=6), seed=st.integers(0, 2**31))
def test_texts_allowed_by_masks_are_valid_for_the_schema(wanted, seed):
    """A walk through the masks, with any token they allow: at every place where it may end, it is valid."""
    draw, vocabulary = random.Random(seed), tiny_vocabulary()
    matcher = compile_grammar(Grammar("json_schema", json.dumps(wanted)), vocabulary).start()
    spelled, new = b"", []
    for _ in range(300):
        found, state = allowed(matcher, *new)
        if state is MatchState.MAY_STOP:
            jsonschema.validate(json.loads(spelled), wanted, jsonschema.Draft202012Validator)
            if not found or EOS in found:
                return
        assert found and max(found) <= EOS, f"stuck after {spelled!r}"
        new = [draw.choice(sorted(found))]
        spelled += vocabulary.tokenizer.decode_bytes(new)


def test_an_end_token_that_is_no_token_is_no_fault():
    vocabulary = Vocabulary(tiny_tokenizer(), (EOS, 10_000_000))
    assert vocabulary.tokenizer.eos_token == tiny_vocabulary().tokenizer.eos_token
