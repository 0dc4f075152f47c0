"""The protocol of constraints, with toy matchers in place of grammars."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from engine.constraint import MatchState
from engine.errors import InvalidRequest, StepFailed
from engine.outputs import FinishReason
from tests.engine.tiny_engine import answers, tiny_engine, tiny_request, tiny_tokenizer


@dataclass
class Matcher:
    """Lets through the texts of a script, one letter a token, and takes notes of what it is told."""

    script: str
    at_end: MatchState
    seen: list[int] = field(default_factory=list)
    problem: str = ""

    @classmethod
    def fill_masks(cls, matchers, new_token_ids, masks):
        states = []
        for matcher, new, mask in zip(matchers, new_token_ids, masks, strict=True):
            matcher.seen += new
            if len(matcher.seen) < len(matcher.script):
                mask &= bits(matcher.script[len(matcher.seen)])
                states.append(MatchState.MUST_CONTINUE)
                continue
            if matcher.at_end is not MatchState.DONE:
                mask[:] = 0
            states.append(matcher.at_end)
        return states


class OtherMatcher(Matcher):
    """Another kind, which the same row may have beside the first."""


@dataclass(frozen=True)
class Script:
    script: str
    at_end: MatchState = MatchState.MAY_STOP
    kind: type[Matcher] = Matcher

    def start(self):
        return self.kind(self.script, self.at_end)


def bits(text: str):
    """A mask row of the tokens of a text."""
    row = np.zeros(352, np.uint8)
    row[tiny_tokenizer().encode(text, add_special_tokens=False).ids] = 1
    return np.packbits(row, bitorder="little").view(np.int32)


def scripted(*scripts: Script, seed: int = 7, **options):
    return replace(tiny_request("prompt", seed=seed, **options), constraints=scripts)


async def test_matchers_get_every_token_once_and_in_order(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        texts = ["abc", "xyzzy", "q", "some longer words"]
        results = await answers(engine, [scripted(Script(text)) for text in texts])
        assert [delta.text for delta in results] == texts
        assert {delta.finish_reason for delta in results} == {FinishReason.STOP}


async def test_several_constraints_hold_together():
    async with tiny_engine() as engine:
        both = scripted(Script("same"), Script("same", kind=OtherMatcher), Script("same"))
        assert (await answers(engine, [both]))[0].text == "same"
        for kind in (Matcher, OtherMatcher):
            with pytest.raises(InvalidRequest):
                await answers(engine, [scripted(Script("same"), Script("some", kind=kind))])


async def test_a_fault_in_a_mask_ends_its_requests_alone(run_ahead):
    class Panic(BaseException):
        """What a fault in Rust looks like."""

    class Faulty(Matcher):
        @classmethod
        def fill_masks(cls, matchers, new_token_ids, masks):
            raise Panic

    async with tiny_engine(run_ahead=run_ahead) as engine:
        [expected] = await answers(engine, [tiny_request("prompt", 40)])
        requests = [scripted(Script("abc", kind=Faulty)), scripted(Script("abc")), tiny_request("prompt", 40)]
        bad, good, plain = [engine.submit(request) for request in await engine.prepare(requests)]
        with pytest.raises(StepFailed, match="Computing"):
            await bad.collect()
        assert (await good.collect()).text == "abc"
        assert (await plain.collect()).text == expected.text


async def test_a_request_that_must_continue_and_cannot_fails_alone(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        good, bad = await engine.prepare(
            [scripted(Script("abc")), scripted(Script("ab", MatchState.MUST_CONTINUE))]
        )
        streams = engine.submit(good), engine.submit(bad)
        assert (await streams[0].collect()).text == "abc"
        with pytest.raises(InvalidRequest, match="satisfies"):
            await streams[1].collect()
        assert engine.stats().corrupted_requests_total == 0


async def test_a_row_whose_constraints_are_done_waits_for_no_mask(run_ahead):
    async with tiny_engine(run_ahead=run_ahead) as engine:
        [delta] = await answers(engine, [scripted(Script("abc", MatchState.DONE), max_tokens=40)])
        assert delta.text.startswith("abc") and delta.num_tokens > 3
        assert engine.stats().constrained_steps_total == 4
        [plain] = await answers(engine, [tiny_request("promptabc", max_tokens=37)])
        assert delta.text == "abc" + plain.text, "free is as if there had been nothing"


async def test_matchers_of_ended_sequences_are_dropped(run_ahead):
    """Slots are taken again in the order they were given back, so the last of many may rest for long."""
    async with tiny_engine(run_ahead=run_ahead) as engine:
        await answers(engine, [scripted(Script("abc" * 3)) for _ in range(3)])
        await answers(engine, [tiny_request("prompt", max_tokens=4)])
        await answers(engine, [scripted(Script("xy"))])
        followed = engine._device._runner._masks._rows
        assert len(followed) <= 1, f"{len(followed)} are followed"


async def test_a_slot_forgets_the_constraint_of_the_sequence_before(run_ahead):
    async with tiny_engine(run_ahead=run_ahead, max_num_seqs=1) as engine:
        [expected] = await answers(engine, [tiny_request("prompt", 40)])
        await answers(engine, [scripted(Script("abc" * 30), max_tokens=5)])
        assert (await answers(engine, [tiny_request("prompt", 40)])) == [expected]
        assert (await answers(engine, [scripted(Script("xyz"))]))[0].text == "xyz"
