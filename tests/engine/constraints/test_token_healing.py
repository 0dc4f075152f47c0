"""A prompt whose last token is removed is spelled again by the output, and not shown twice."""

from dataclasses import replace

import pytest

from engine.constraint import Constraint, MatchState
from engine.constraints.kinds import constraints_of
from engine.constraints.token_healing import num_taken_back
from engine.errors import InvalidRequest
from engine.request import Grammar, SamplingParams
from engine.text.token_bytes import TokenPieces
from tests.engine.tiny_engine import (
    EOS,
    NUM_WORDS,
    VOCAB_SIZE,
    allowed,
    answers,
    tiny_engine,
    tiny_request,
    tiny_tokenizer,
)

PIECES = TokenPieces(tiny_tokenizer())


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


def healing(*token_ids: int) -> Constraint:
    sampling = SamplingParams(max_tokens=1, healed_token_ids=token_ids)
    [constraint] = constraints_of(sampling, PIECES, None)
    return constraint


def by_definition(rest: bytes) -> set[int]:
    """Ids of the tokens that begin with `rest`, or that it begins with."""
    found = set()
    for token_id in range(tiny_tokenizer().get_vocab_size()):
        data = PIECES.piece(token_id).data
        if not PIECES.is_special(token_id) and (data.startswith(rest) or rest.startswith(data)):
            found.add(token_id)
    return found


@pytest.mark.parametrize("text", ["t", "tr", "true", "n", "nul", '{"', "ä", " ", "\n", "l", "不", "1"])
def test_allowed_tokens_match_the_definition(text):
    matcher = healing(*ids_of(text)).start()
    assert allowed(matcher) == (by_definition(text.encode()), MatchState.MUST_CONTINUE)


def test_every_split_of_the_text_is_accepted():
    [tr], [t], [r] = ids_of("tr"), ids_of("t"), ids_of("r")
    [true] = ids_of("true")
    constraint = healing(tr)
    matcher = constraint.start()
    assert allowed(matcher)[0] == {t, tr, true}
    assert allowed(matcher, t) == (by_definition(b"r"), MatchState.MUST_CONTINUE)
    assert allowed(matcher, r)[1] is MatchState.DONE
    for spelling in ((tr,), (true,), (t, r), (t, r, EOS)):
        assert allowed(constraint.start(), *spelling) == (set(range(NUM_WORDS * 32)), MatchState.DONE)


@pytest.mark.parametrize(
    ("token_ids", "number"),
    [
        (ids_of("a tr"), 1),
        (ids_of("aä"), 1),
        (ids_of("a不"), len(ids_of("a不")) - 1),
        (ids_of("a不")[:-1], 0),
        (ids_of("a") + ids_of("不")[-1:], 0),
        (ids_of("a"), 0),
        ((*ids_of("a"), EOS), 0),
        ((*ids_of("a"), VOCAB_SIZE - 1), 0),
        ((EOS, *ids_of("a")), 1),
    ],
)
def test_complete_characters_are_taken_back(token_ids, number):
    assert num_taken_back(token_ids, PIECES) == number


def sampled(text: str, seed: int, max_tokens: int = 12, **sampling):
    request = tiny_request(text, max_tokens, seed=seed, temperature=3.0, ignore_eos=True, **sampling)
    return replace(request, return_tokens=True)


@pytest.mark.parametrize("text", ['say {"', "a tru", "is ä", "一不", "x\n", "be n"])
async def test_the_answer_continues_the_prompt(run_ahead, text):
    requests = [sampled(text, seed, token_healing=True) for seed in range(4)]
    requests.append(sampled(text, 0))
    async with tiny_engine(run_ahead=run_ahead) as engine:
        prepared = await engine.prepare(requests)
        deltas = [await stream.collect() for stream in engine.submit_group(prepared[:4])]
        again = await answers(engine, requests)
        assert engine.stats().constrained_steps_total
    for request, delta in zip(prepared, deltas, strict=False):
        spelled = b"".join(token.piece.data for token in delta.tokens)
        kept = b"".join(PIECES.piece(token_id).data for token_id in request.prompt_token_ids)
        whole = (kept + spelled).decode(errors="replace")
        assert len(kept) < len(text.encode())
        assert whole == text + delta.text, "nothing is lost, and nothing said twice"
        assert delta.num_tokens == len(delta.tokens) == 12
    assert [delta.text for delta in again[:4]] == [delta.text for delta in deltas]
    assert prepared[4] == requests[4]


async def test_a_prompt_whose_end_is_likely_is_healed_to_the_likeliest_token():
    """Greedy: with bias towards a longer token, that one is chosen in place of the prompt's last."""
    [true] = ids_of("true")
    request = tiny_request(
        "a tr", 1, temperature=0.0, token_healing=True, logit_bias=((true, 100.0),), ignore_eos=True
    )
    async with tiny_engine() as engine:
        [delta] = await answers(engine, [request])
    assert delta.text == "ue"


async def test_stop_strings_are_searched_in_shown_text_only(run_ahead):
    [true] = ids_of("true")
    fields = {"token_healing": True, "logit_bias": ((true, 100.0),), "temperature": 0.0, "ignore_eos": True}
    async with tiny_engine(run_ahead=run_ahead) as engine:
        deltas = await answers(
            engine, [tiny_request("a tr", 4, stop=stop, **fields) for stop in (("tr",), ("uet",), ("e",))]
        )
    assert [delta.text for delta in deltas] == ["ue", "", "u"]
    assert [delta.stop_reason for delta in deltas] == ["tr", "uet", "e"]


async def test_an_answer_that_ends_before_the_prompt_does_is_empty():
    [t] = ids_of("t")
    fields = {"token_healing": True, "logit_bias": ((t, 100.0),), "temperature": 0.0, "ignore_eos": True}
    async with tiny_engine() as engine:
        [delta] = await answers(engine, [tiny_request("a true", 1, **fields)])
    assert (delta.text, delta.num_tokens) == ("", 1)


async def test_half_a_character_that_the_prompt_shows_is_not_shown_again():
    single = next(i for i in range(256) if PIECES.piece(i).data == "不".encode()[:1])
    fields = {"token_healing": True, "logit_bias": ((single, 100.0),), "temperature": 0.0, "ignore_eos": True}
    async with tiny_engine() as engine:
        [delta] = await answers(engine, [tiny_request("a不", 1, **fields)])
    assert (delta.text, delta.num_tokens) == ("", 1)


async def test_preemption_changes_nothing(run_ahead):
    requests = [sampled("a tru", seed, max_tokens=50, token_healing=True) for seed in range(6)]
    texts = []
    for kv_tokens in (8192, 160):
        async with tiny_engine(run_ahead=run_ahead, kv_tokens=kv_tokens, overcommit=1.0) as engine:
            texts.append([delta.text for delta in await answers(engine, requests)])
            num_preemptions = engine.stats().preemptions_total
    assert num_preemptions, "the pool is too large for this test"
    assert texts[0] == texts[1]


async def test_healing_excludes_grammars_and_must_be_prepared():
    async with tiny_engine() as engine:
        with pytest.raises(InvalidRequest, match="token_healing"):
            await engine.prepare([tiny_request("ab", token_healing=True, grammar=Grammar("json_object"))])
        with pytest.raises(ValueError, match="prepare"):
            engine.submit(tiny_request("ab", token_healing=True))
