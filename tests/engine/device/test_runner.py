"""The runner with a tiny model of random weights: what the sampler is asked for, it does.

On a GPU decode steps are replayed graphs, so the same tests show that both samplers are captured whole.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.constraint import MatchState
from engine.device import readouts
from engine.device.runner import ModelRunner
from engine.outputs import NO_TOKEN, Row, RowReadout, SlotInit, StepOutput, StepPlan
from engine.readouts import PromptLogprobs
from engine.request import SamplingParams

EOS = (3,)
PROMPT = (5, 6, 7, 8, 9)


class Steps:
    """Drives a runner by hand: every sequence has slot and pages of its own."""

    def __init__(self, model, **config):
        settings = EngineConfig(
            device=model.device.type, kv_tokens=512, max_model_len=64, max_num_seqs=4, page_size=16, **config
        )
        self.runner = ModelRunner.around(model, settings, 64, EOS)
        self.ids: Iterator[int] = count()
        self.lengths: dict[int, int] = {}

    def start(
        self, slot: int, sampling: SamplingParams, prompt=PROMPT, outputs=(), constraints=()
    ) -> StepOutput:
        tokens = (*prompt, *outputs)
        init = SlotInit(sampling, 11, prompt, tuple(outputs), tuple(constraints))
        pages = tuple(range(slot * 4, slot * 4 + 4))
        self.lengths[slot] = len(tokens)
        return self.launch(Row(slot, slot, 0, tokens, new_pages=(pages,), init=init))

    def launch(self, *rows: Row) -> StepOutput:
        return self.runner.launch(StepPlan.of(next(self.ids), rows)).wait()

    def decode(self, *slots: int) -> StepOutput:
        rows = [Row(slot, slot, self.lengths[slot]) for slot in slots]
        for slot in slots:
            self.lengths[slot] += 1
        return self.launch(*rows)

    def run(self, slot: int, num_tokens: int, **sampling) -> list[int]:
        tokens = [self.start(slot, SamplingParams(max_tokens=50, **sampling)).tokens[0][0]]
        return tokens + [self.decode(slot).tokens[0][0] for _ in range(num_tokens - 1)]


def test_bias_forces_and_forbids(model):
    steps = Steps(model)
    assert steps.run(0, 3, temperature=0.0, logit_bias=((17, 1000.0),)) == [17, 17, 17]
    plain = steps.run(0, 5, temperature=0.0)
    banned = steps.run(0, 5, temperature=0.0, logit_bias=((plain[0], -1000.0),))
    assert plain[0] not in banned
    assert steps.run(0, 5, temperature=0.0) == plain, "a slot forgets the bias of the sequence before"


def test_only_allowed_tokens_are_chosen(model):
    steps = Steps(model)
    allowed = frozenset([2, 40, 100])
    assert set(steps.run(0, 12, temperature=5.0, allowed_token_ids=allowed)) <= allowed


def test_no_end_before_min_tokens(model):
    steps = Steps(model)
    forced = {
        "temperature": 0.0,
        "logit_bias": ((EOS[0], 1000.0), (40, 900.0)),
        "stop_token_ids": frozenset([40]),
    }
    tokens = steps.run(0, 5, min_tokens=3, **forced)
    assert EOS[0] not in tokens[:3] and 40 not in tokens[:3]
    assert tokens[3:] == [EOS[0], EOS[0]]
    resumed = SamplingParams(max_tokens=50, min_tokens=3, **forced)
    first = steps.start(0, resumed, outputs=tokens[:2]).tokens[0][0]
    assert [first, steps.decode(0).tokens[0][0]] == tokens[2:4], "the same after a preemption"


class Script:
    """A constraint, and what follows it, in one: these tokens, and then the end."""

    def __init__(self, *token_ids: int):
        self.left = list(token_ids)

    def start(self):
        return Script(*self.left)

    problem = ""

    @classmethod
    def fill_masks(cls, matchers, new_token_ids, masks):
        for matcher, new, mask in zip(matchers, new_token_ids, masks, strict=True):
            assert matcher.left[: len(new)] == list(new), "told what was chosen, once and in order"
            del matcher.left[: len(new)]
            bits = np.zeros(len(mask) * 32, np.uint8)
            bits[matcher.left[:1]] = 1
            mask &= np.packbits(bits, bitorder="little").view(np.int32)
        return [MatchState.MUST_CONTINUE if matcher.left else MatchState.MAY_STOP for matcher in matchers]


def test_a_constrained_row_obeys_and_disturbs_no_other(model):
    steps = Steps(model)
    expected = steps.run(1, 6, temperature=0.0)
    script = (17, 200, 40, 17, 255)
    steps.start(1, SamplingParams(max_tokens=50, temperature=0.0))
    told = [steps.start(0, SamplingParams(max_tokens=50), constraints=[Script(*script)])]
    assert told[0].num_constrained == 1
    told += [steps.decode(1, 0) for _ in range(5)]
    assert [step.tokens[-1] for step in told] == [*((token,) for token in script), ()]
    assert [step.tokens[0][0] for step in told[1:]] == expected[1:]
    assert steps.decode(1).num_constrained == 0
    resumed = steps.start(0, SamplingParams(max_tokens=50), outputs=script[:2], constraints=[Script(*script)])
    assert [*resumed.tokens[0], *steps.decode(0).tokens[0]] == list(script[2:4]), (
        "the same after a preemption"
    )
    assert steps.run(0, 6, temperature=0.0) == expected, (
        "a slot forgets the constraint of the sequence before"
    )


def test_a_constraint_and_the_other_masks_hold_together(model):
    steps = Steps(model)
    allowed = SamplingParams(max_tokens=50, allowed_token_ids=frozenset([17, 18]))
    told = steps.start(0, allowed, constraints=[Script(17, 40)])
    assert [told.tokens[0], steps.decode(0).tokens[0]] == [(17,), (NO_TOKEN,)]


def test_logits_are_edited_no_longer_than_needed(model):
    """Who needs edits costs everybody in the same step the full sampler."""
    steps = Steps(model)
    slots = steps.runner._slots
    steps.start(0, SamplingParams(max_tokens=50, min_tokens=3))
    steps.start(1, SamplingParams(max_tokens=50, min_tokens=3, allowed_token_ids=frozenset([2, 40])))
    assert slots.needs_logit_edits([0]) and slots.needs_logit_edits([1])
    for _ in range(3):
        steps.decode(0, 1)
    assert not slots.needs_logit_edits([0]), "it may end since its third token"
    assert slots.needs_logit_edits([1])
    assert set(steps.run(1, 5, temperature=5.0, allowed_token_ids=frozenset([2, 40]))) <= {2, 40}


def test_memory_that_runs_out_once_is_no_fault(model, monkeypatch):
    """The forward pass is done again, and nothing that was counted already is counted twice."""
    steps = Steps(model)
    greedy = {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    expected = steps.run(0, 8, **greedy)
    forward, calls = steps.runner._forward, count()

    def fail_every_other_time(*step):
        if next(calls) % 2 == 0:
            raise torch.OutOfMemoryError
        return forward(*step)

    monkeypatch.setattr(steps.runner, "_forward", fail_every_other_time)
    assert steps.run(0, 8, **greedy) == expected


def test_penalties_see_prompt_and_output(model):
    steps = Steps(model)
    plain = steps.run(0, 12, temperature=0.0)
    repeated = steps.run(0, 12, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(repeated)) >= len(set(plain))
    strong = steps.run(0, 12, temperature=0.0, repetition_penalty=1e6)
    assert len(set(strong)) == 12 and not set(strong) & set(PROMPT), "what was seen is never best again"


def test_logprobs_are_those_of_the_raw_logits(model):
    steps = Steps(model)
    options = {"temperature": 0.0, "logit_bias": ((17, 1000.0),)}
    told = steps.start(0, SamplingParams(max_tokens=9, logprobs=3, **options))
    assert told.logprobs is not None
    (told_logprobs,) = told.logprobs[0]
    assert told.tokens[0] == (17,)
    quiet = steps.start(1, SamplingParams(max_tokens=9, temperature=0.0))
    assert quiet.logprobs is None
    assert told_logprobs.top[0][0] == quiet.tokens[0][0], "bias does not show in what is told"
    values = [value for _, value in told_logprobs.top]
    assert len(values) == 3 and values == sorted(values, reverse=True)
    assert told_logprobs.logprob < values[-1] < 0
    both = steps.decode(0, 1)
    assert both.logprobs is not None
    assert both.logprobs[0][0] is not None and both.logprobs[1] == (None,)


def test_a_row_of_nan_gets_no_token_and_harms_no_other(model, monkeypatch):
    if model.device.type == "cuda":
        pytest.skip("what is patched here is captured already; the kernel has a test of its own")
    steps = Steps(model)
    expected = steps.run(1, 3, temperature=0.0)
    steps.run(0, 1, temperature=0.0)
    steps.start(1, SamplingParams(max_tokens=9, temperature=0.0))
    original = type(model).logits

    def broken(self, hidden):
        logits = original(self, hidden)
        logits[0] = torch.nan
        return logits

    monkeypatch.setattr(type(model), "logits", broken)
    assert steps.decode(0, 1).tokens == [(NO_TOKEN,), (expected[1],)]


def test_a_copied_page_continues_like_its_source(model):
    """A follower shares full pages of a prompt, gets a copy of the last, and computes the last token."""
    steps = Steps(model)
    prompt = tuple(range(5, 25))  # one full page of 16, and four tokens
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    expected = [steps.start(0, sampling, prompt).tokens[0][0]]
    init = SlotInit(sampling, seed=11, prompt_token_ids=prompt, output_token_ids=())
    row = Row(1, 1, 19, prompt[19:], new_pages=((0, 9),), init=init)
    plan = StepPlan.of(next(steps.ids), [row], page_copies=[(1, 9)])
    steps.lengths[1] = len(prompt)
    tokens = [steps.runner.launch(plan).wait().tokens[0][0]]
    for _ in range(5):
        both = steps.decode(0, 1).tokens
        expected.append(both[0][0])
        tokens.append(both[1][0])
    assert tokens == expected


def test_prompt_logprobs_are_those_of_the_raw_logits_in_slices_of_any_size(model, monkeypatch):
    """A prompt in two pieces, each beside a sampled row."""
    prompt = tuple(range(10, 22))
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((17, 1000.0),))
    told = []
    for slice_bytes in (readouts.SLICE_BYTES, 1, 4 * 3 * model.spec.vocab_size):
        monkeypatch.setattr(readouts, "SLICE_BYTES", slice_bytes)
        steps = Steps(model)
        steps.start(0, SamplingParams(max_tokens=9))
        init = SlotInit(sampling, 11, prompt, ())
        pages = tuple(range(4, 8))
        first = RowReadout(PromptLogprobs(2), 2, 3, prompt[3:6], False)
        second = RowReadout(PromptLogprobs(3), 5, 6, prompt[6:], True)
        rows = [
            Row(1, 1, 0, prompt[:5], 0, (pages,), init, (first,)),
            Row(1, 1, 5, prompt[5:], readouts=(second,)),
        ]
        found = []
        for row in rows:
            output = steps.launch(Row(0, 0, steps.lengths[0]), row)
            steps.lengths[0] += 1
            assert output.logprobs is None and list(output.readouts) == [1]
            assert [len(tokens) for tokens in output.tokens] == [1, row.num_logits]
            found += output.readouts[1][0].each()
        told.append(found)
    for others in told[1:]:
        for one, other in zip(told[0], others, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [len(token.top) for token in told[0]] == [2] * 3 + [3] * 6
    # Sampled greedily one after the other, they would have had the same log-probabilities.
    for place, token in enumerate(told[0], 3):
        options = {"temperature": 0.0, "logprobs": 2, "logit_bias": ((prompt[place], 1e6),)}
        output = Steps(model).start(0, SamplingParams(max_tokens=9, **options), prompt[:place])
        assert output.tokens == [(prompt[place],)] and output.logprobs is not None
        (sampled,) = output.logprobs[0]
        assert sampled.logprob == pytest.approx(token.logprob, abs=1e-4)
        assert [i for i, _ in sampled.top] == [i for i, _ in token.top[:2]]


def test_drafts_are_accepted_up_to_the_first_wrong_one(model):
    """The tokens, their log-probabilities and those after them are those of one token at a time."""
    sampling = SamplingParams(max_tokens=50, temperature=0.9, logprobs=2)
    steps = Steps(model)
    outputs = [steps.start(0, sampling), *(steps.decode(0) for _ in range(12))]
    expected = [output.tokens[0][0] for output in outputs]
    for num_drafts, num_right in ((1, 0), (1, 1), (4, 0), (4, 2), (4, 4)):
        steps = Steps(model)
        tokens = [*steps.start(0, sampling).tokens[0]]
        logprobs = []
        while len(tokens) + num_drafts < len(expected):
            known = len(tokens)
            drafts = expected[known : known + num_right]
            drafts += [(expected[known + len(drafts)] + 1) % 100] * (num_drafts - len(drafts))
            start = len(PROMPT) + known - 1
            row = Row(0, 0, start, (tokens[-1], *drafts), num_logits=1 + num_drafts)
            beside = Row(1, 1, 0, PROMPT, new_pages=((4,),), init=SlotInit(sampling, 3, PROMPT, ()))
            output = steps.launch(row, beside)
            index = 0 if num_drafts + 1 > 1 else 1
            assert len(output.tokens[index]) == num_right + 1
            tokens += output.tokens[index]
            assert output.logprobs is not None
            logprobs += output.logprobs[index]
        assert tokens == expected[: len(tokens)], f"{num_right} of {num_drafts} drafts are right"
        for found, alone in zip(logprobs, outputs[1:], strict=False):
            assert alone.logprobs is not None
            assert found.logprob == pytest.approx(alone.logprobs[0][0].logprob, abs=1e-4)
