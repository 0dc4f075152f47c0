"""Compiling grammars: what is refused and how, what is kept, and that a mask is exact."""

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

import engine.text.grammar as room
from engine.constraint import Standing
from engine.errors import Draining, InvalidRequest, QueueFull
from engine.request import Grammar
from engine.text import grammar_source, json_schema
from engine.text.grammar import GrammarCompiler, Vocabulary, compile_grammar
from tests.engine.tiny_engine import EOS, allowed, tiny_tokenizer, tiny_vocabulary


@pytest.fixture
async def compiler():
    compiler = GrammarCompiler(tiny_vocabulary())
    yield compiler
    compiler.close()


def schema(value) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "grammar",
    [
        schema({"const": "a<turn>b"}),
        schema({"type": "object", "properties": {"<eos>": {"const": 1}}, "required": ["<eos>"]}),
        schema({"type": "string", "pattern": "^<(t)urn>$"}),
        Grammar("json_schema", r'{"const": "\u003cturn\u003E"}'),
        Grammar("choice", '["<turn>"]'),
        Grammar("regex", r"x<turn>"),
        Grammar("regex", r"<[t]u{1}rn\x3e"),
        Grammar("ebnf", 'root ::= "<tu" "rn>"'),
    ],
    ids=lambda grammar: grammar.source,
)
async def test_text_never_spells_a_control_token(compiler, grammar):
    """The tokens that may follow never are control tokens, though their text would fit."""
    control = {
        token_id for token_id, token in tiny_tokenizer().get_added_tokens_decoder().items() if token.special
    }
    text, new = "", []
    follower = (await compiler.compile(grammar)).follow()
    for _ in range(100):
        token_ids, _ = allowed(follower, *new)
        assert token_ids.isdisjoint(control - {EOS}), "a control token may follow " + repr(text)
        if EOS in token_ids or not token_ids:
            break
        new = [min(token_ids)]
        text += tiny_tokenizer().decode(new)
    assert "<turn>" in text or "<eos>" in text


BAD = {
    "no JSON": (Grammar("json_schema", "{"), "Expecting"),
    "no object": (Grammar("json_schema", "[1]"), "object"),
    "unknown type": (schema({"type": "text"}), "text"),
    "not supported": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "not lenient": (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
    "missing ref": (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    "remote ref": (schema({"$ref": "http://127.0.0.1:9/schema"}), "127.0.0.1"),
    "circular ref": (schema({"$ref": "#"}), ""),
    "empty": (schema(False), ""),
    "contradiction": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "greater"),
    "deep": (Grammar("json_schema", nested(json_schema.MAX_DEPTH)), "nested deeper"),
    "very deep": (Grammar("json_schema", nested(5000)), "too deeply"),
    "large": (schema({"enum": ["x" * grammar_source.MAX_SOURCE_CHARS]}), "characters"),
    "many cases": (
        schema(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(5)]} for i in range(20)]}
        ),
        "too large",
    ),
    "bad regex": (Grammar("regex", "(a"), "unclosed"),
    "look-around": (Grammar("regex", "(?=a)b"), "look-around"),
    "huge regex": (Grammar("regex", "(" * 1000 + "a" + "{1,1000})" * 1000), ""),
    "NUL": (Grammar("regex", "a\0b"), "NUL"),
    "no match": (Grammar("regex", "[^\\s\\S]"), ""),
    "no list": (Grammar("choice", '"a"'), "choices"),
    "no choices": (Grammar("choice", "[]"), "choices"),
    "no strings": (Grammar("choice", "[1]"), "strings"),
    "half an escape": (Grammar("regex", "a\\"), "backslash"),
    "half an escape more": (Grammar("regex", "a\\\\\\"), "backslash"),
    "many choices": (Grammar("choice", json.dumps(["a"] * (grammar_source.MAX_CHOICES + 1))), "at most"),
    "many at once": (
        Grammar("ebnf", "start: A\nA: " + " & ".join(f"/.*{letter}.*/" for letter in "abcdefghij")),
        "same text",
    ),
    "bad grammar": (Grammar("ebnf", "root ::= missing"), "missing"),
    "no grammar": (Grammar("ebnf", "once upon a time"), ""),
    "deep grammar": (Grammar("ebnf", "root ::= " + "(" * 10_000), ""),
    "large grammar": (Grammar("ebnf", "root ::= " + '"a" ' * grammar_source.MAX_EBNF_CHARS), "characters"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_grammar_is_refused_by_name(compiler, name):
    grammar, hint = BAD[name]
    grammar = Grammar(grammar.kind, grammar.source, param="response_format", label="schema for 'x'")
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(grammar)
    message = str(caught.value)
    assert caught.value.param == "response_format"
    assert message.startswith("Invalid schema for 'x': ") and len(message) < 1100
    assert hint in message, message


MANY = [f"a{number}" for number in range(grammar_source.MAX_CHOICES)]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", json.dumps(MANY)),
        Grammar("regex", "|".join(MANY)),
        schema({"enum": MANY}),
        Grammar("ebnf", "root ::= " + "|".join(f'"{text}"' for text in MANY[:4000])),
    ],
    ids=lambda grammar: grammar.kind,
)
async def test_as_many_alternatives_as_are_allowed_can_be_written(compiler, grammar):
    """A limit of the library on what may be open at once would strike behind the first token."""
    text = "a3999" if grammar.kind != "json_schema" else '"a3999"'
    follower = (await compiler.compile(grammar)).follow()
    new = []
    for token_id in tiny_tokenizer().encode(text, add_special_tokens=False).ids:
        assert token_id in allowed(follower, *new)[0], f"{text} ends after {new}"
        new = [token_id]
    assert allowed(follower, *new)[1] is Standing.MAY_END


@pytest.mark.parametrize("is_closed", [False, True])
async def test_an_object_may_have_thousands_of_optional_properties(compiler, is_closed):
    properties = {f"k{number}": {"type": "integer"} for number in range(2000)}
    grammar = schema({"type": "object", "properties": properties, "additionalProperties": not is_closed})
    follower = (await compiler.compile(grammar)).follow()
    new = []
    for token_id in tiny_tokenizer().encode('{"k7":1,"k1999":2}', add_special_tokens=False).ids:
        assert token_id in allowed(follower, *new)[0], f"ends after {new}"
        new = [token_id]


FOLLOWED = [
    ('root ::= "\\x41\\u00e9" [\\u0400-\\u04FF] "\\u0022\\x5c"', 'AéЖ"\\'),
    ('root ::= [\\u00a0\\u002d\\x5d] [\\u0001-\\u001f] "\\x22\\x5c\\x5b]"', ']\n"\\[]'),
    ('start: "%json {  }" /%json [{]"a":  1}/', '%json {  }%json {"a":  1}'),
    ('# a comment\nroot ::= [^"] "::="', "a::="),
    ('?start: expr\n?expr: NUM | expr "+" NUM\nNUM: /[0-9]/', "1+2"),
    ('start[capture]: "a"', "a"),
    ("start: A\nA: T & U // both\nT: /a+/\nU: /.{3}/", "aaa"),
    ('start: %json {"const": 1}', "1"),
    ('start: "x" <turn>', "x<turn>"),
    ('start: "x" // <turn>\n', "x"),
]


@pytest.mark.parametrize(("source", "text"), FOLLOWED)
async def test_grammars_as_their_languages_have_them(compiler, source, text):
    follower, new = (await compiler.compile(Grammar("ebnf", source))).follow(), []
    for token_id in tiny_tokenizer().encode(text, add_special_tokens=False).ids:
        assert token_id in allowed(follower, *new)[0], f"{text!r} ends after {new}"
        new = [token_id]
    assert allowed(follower, *new)[1] is Standing.MAY_END


@pytest.mark.parametrize("text", ["\x7f\x80", 'a"b\\\n', "\u2028é😀", "<turn>"])
async def test_choices_may_be_any_text(compiler, text):
    follower, new = (await compiler.compile(Grammar("choice", json.dumps([text])))).follow(), []
    decode = tiny_vocabulary().tokenizer.decode_bytes
    for data in text.encode():
        new = [token_id for token_id in allowed(follower, *new)[0] if decode([token_id]) == bytes([data])]
        assert len(new) == 1, f"{text!r} cannot be written"
    assert allowed(follower, *new)[1] is Standing.MAY_END


async def test_names_of_control_tokens_are_told_by_nobody(compiler):
    with pytest.raises(InvalidRequest) as caught:
        await compiler.compile(Grammar("ebnf", "start: <|nobody|>"))
    assert "nobody" in str(caught.value) and len(str(caught.value)) < 200, caught.value


async def test_a_grammar_that_becomes_too_much_says_so(compiler):
    """What compiles may still run into a limit of the library behind many tokens."""
    follower = (await compiler.compile(Grammar("ebnf", 'start: "a"{100000}'))).follow()
    found, new = {0}, []
    for _ in range(5):
        found, standing = allowed(follower, *new)
        new = sorted(found)[:1]
    assert (found, standing) == (set(), Standing.GOES_ON)
    assert "limit" in follower.problem, follower.problem


# What costs other compilers minutes, and the characters with which such a text begins.
HOSTILE = {
    "many states": (Grammar("regex", "(a+)+(a|b)*a(a|b){200}((c{1,100}){1,100}){1,100}"), "a"),
    "backtracking": (schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}), '"'),
    "long array": (schema({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}), "["),
    "long string": (schema({"type": "string", "minLength": 100_000}), '"'),
    "doubled refs": (
        schema(
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)}
                | {"d25": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            }
        ),
        "-0123456789",
    ),
    "many values": (schema({"enum": [f"value {i}" for i in range(5000)]}), '"'),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_looks_hostile_is_compiled_while_the_loop_goes_on(compiler, monkeypatch, name):
    grammar, beginnings = HOSTILE[name]
    has_begun, loop_went_on, translate = threading.Event(), threading.Event(), room.translate
    waits: list[bool] = []

    def translate_once_the_loop_went_on(*args):
        has_begun.set()
        waits.append(loop_went_on.wait(10))
        return translate(*args)

    monkeypatch.setattr(room, "translate", translate_once_the_loop_went_on)
    compiling = asyncio.create_task(compiler.compile(grammar))
    assert await asyncio.to_thread(has_begun.wait, 10)
    loop_went_on.set()
    follower = (await compiling).follow()
    assert waits == [True], "the loop stood still while the grammar was compiled"
    found, standing = allowed(follower)
    texts = [tiny_vocabulary().tokenizer.decode_bytes([token_id]).decode() for token_id in found]
    assert {text[0] for text in texts} == set(beginnings)
    assert standing is Standing.GOES_ON


async def test_compiled_once_and_kept_for_a_while(compiler, monkeypatch):
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


async def test_too_slow_is_refused(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(room, "translate", lambda *args: gate.wait())
    compiler = GrammarCompiler(tiny_vocabulary(), compile_seconds=0.01)
    with pytest.raises(InvalidRequest, match="not ready"):
        await compiler.compile(Grammar("json_object"))
    gate.set()
    compiler.close()


async def test_who_waits_for_others_grammars_is_not_told_that_its_own_is_slow(monkeypatch):
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


async def test_a_number_of_grammars_wait_for_a_thread_and_no_more(compiler, gate):
    waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in numbered(room.MAX_JOBS)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await compiler.compile(Grammar("choice", '["one more"]'))
    waiting.append(asyncio.create_task(compiler.compile(numbered(1)[0])))  # who asks for one of them may wait
    gate.set()
    assert all(await asyncio.gather(*waiting))
    assert await compiler.compile(Grammar("choice", '["one more"]'))


async def test_what_nobody_waits_for_is_not_compiled(compiler, gate):
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


async def test_a_job_under_way_outlives_any_number_of_others(compiler, monkeypatch):
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


async def test_who_still_waits_at_the_end_is_told(compiler, gate):
    waiting = [asyncio.create_task(compiler.compile(grammar)) for grammar in numbered(room.NUM_THREADS + 1)]
    await asyncio.sleep(0)
    compiler.close()
    with pytest.raises(Draining):
        await waiting[-1]
    with pytest.raises(Draining):
        await compiler.compile(Grammar("choice", '["too late"]'))
    gate.set()
    assert all(await asyncio.gather(*waiting[:-1]))


async def test_a_fault_of_the_compiler_is_an_answer(compiler, monkeypatch, caplog):
    class Panic(BaseException):
        """What a fault in Rust looks like."""

    def fail(grammar):
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


async def test_a_tokenizer_whose_decoder_changes_text_is_found_out():
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
    follower = (await compiler.compile(Grammar("regex", "b aä"))).follow()

    steps = [allowed(follower, *new)[0] for new in ((), (4,), (2,), (5,), ())]
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
        found, standing = allowed(grammar.follow(), *path)
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
        assert standing is (Standing.MAY_END if may_end else Standing.GOES_ON), spelled
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


@settings(deadline=None, max_examples=40)
@given(wanted=st.recursive(leaves, compound, max_leaves=6), seed=st.integers(0, 2**31))
def test_whatever_the_masks_let_through_is_what_the_schema_describes(wanted, seed):
    """A walk through the masks, with any token they allow: at every place where it may end, it is valid."""
    draw, vocabulary = random.Random(seed), tiny_vocabulary()
    follower = compile_grammar(schema(wanted), vocabulary).follow()
    spelled, new = b"", []
    for _ in range(300):
        found, standing = allowed(follower, *new)
        if standing is Standing.MAY_END:
            jsonschema.validate(json.loads(spelled), wanted, jsonschema.Draft202012Validator)
            if not found or EOS in found:
                return
        assert found and max(found) <= EOS, f"stuck after {spelled!r}"
        new = [draw.choice(sorted(found))]
        spelled += vocabulary.tokenizer.decode_bytes(new)
