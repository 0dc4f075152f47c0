"""Greedy text of the real model equals transformers', whatever else is in the batch and however it is cut."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
import torch

from engine import Engine
from engine.config import EngineConfig
from engine.readouts import PromptLogprobs
from engine.request import Request, SamplingParams

PROMPT_LENGTHS = [
    1,
    2,
    7,
    15,
    16,
    17,
    31,
    32,
    33,
    47,
    48,
    49,
    63,
    64,
    65,
    100,
    128,
    200,
    255,
    256,
    257,
    511,
    1200,
    3000,
]
NUM_NEW_TOKENS = 64
# Where transformers' two best logits are closer than this, rounding decides, and either token is right.
LOGIT_GAP = 1e-3
MAX_SEQUENCES_THAT_DIFFER = 2


@dataclass
class Reference:
    """transformers' own model, asked what it would have said."""

    model: torch.nn.Module
    known: list[tuple[list[int], list[int], list[tuple[int, float]]]] = field(default_factory=list)

    def differences(self, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
        """What compare() finds, computed once for each text: mostly all ways to generate give the same.

        What comes later changes nothing before it, so a text that goes on tells of its beginning, too.
        """
        for known_prompt, known_output, differences in self.known:
            if known_prompt == prompt and known_output[: len(output)] == output:
                return [(index, gap) for index, gap in differences if index < len(output)]
        found = self.compare(prompt, output)
        self.known.append((prompt, output, found))
        return found

    @torch.inference_mode()
    def compare(self, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
        """Positions where greedy search takes another token, and how much better its logit is.

        One forward pass over prompt and output: if every output token is the argmax after the tokens before
        it, greedy search produces exactly this output.
        """
        logits = self.model(torch.tensor([prompt + output]), logits_to_keep=len(output) + 1).logits[0, :-1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        best = logits.argmax(-1)
        return [
            (index, gaps[index].item()) for index, token in enumerate(output) if best[index].item() != token
        ]


@pytest.fixture(scope="module")
def reference(smollm_reference):
    return Reference(smollm_reference)


@pytest.fixture(scope="module")
def prompts(smollm) -> list[list[int]]:
    """Prompts of exactly the wanted lengths, cut from varied text."""
    from engine.text.tokenizer import Tokenizer

    sentence = "the river tokens 17 engine of a quiet café, paged memory; Zürich 東京 numbers: 3.14 and so on"
    words = [*sentence.split(" "), "\n"]
    rng = random.Random(1)
    tokenizer = Tokenizer(smollm.tokenizer_dir)
    text = " ".join(rng.choice(words) for _ in range(6000))
    [token_ids] = tokenizer.encode_batch([text])
    starts = [rng.randrange(len(token_ids) - 3000) for _ in PROMPT_LENGTHS]
    return [token_ids[start : start + length] for start, length in zip(starts, PROMPT_LENGTHS, strict=True)]


class TokenRecorder:
    """Keeps the tokens of every sequence that ends; the engine itself hands out text only."""

    def __init__(self, engine: Engine) -> None:
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        commit = engine._scheduler.commit

        def recording_commit(plan, output):
            progress = commit(plan, output)
            for sequence, _ in progress:
                if sequence.is_finished:
                    prompt = tuple(sequence.token_ids[: sequence.num_prompt_tokens])
                    self.outputs[prompt] = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
            return progress

        engine._scheduler.commit = recording_commit


def greedy(prompt: list[int], max_tokens: int = NUM_NEW_TOKENS) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request("r", tuple(prompt), sampling)


async def generate(prompts: list[list[int]], **config) -> tuple[list[list[int]], int]:
    """Greedy outputs of all prompts at once, and how many preemptions it took."""
    engine = await Engine.start(EngineConfig(dtype="float32", device="cpu", **config))
    recorder = TokenRecorder(engine)
    try:
        await asyncio.gather(*(engine.submit(greedy(prompt)).collect() for prompt in prompts))
        return [recorder.outputs[tuple(prompt)] for prompt in prompts], engine.stats().preemptions_total
    finally:
        await engine.stop()


def check(
    reference: Reference,
    prompts: list[list[int]],
    outputs: list[list[int]],
    lengths: list[int] | None = None,
) -> None:
    assert [len(output) for output in outputs] == (lengths or [NUM_NEW_TOKENS] * len(prompts))
    num_differ = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        differences = reference.differences(prompt, output)
        for index, gap in differences:
            print(f"prompt of {len(prompt)}: token {index} differs, logit gap {gap:.2e}")
            assert gap < LOGIT_GAP, f"prompt of {len(prompt)}: token {index} is wrong by a logit gap of {gap}"
        num_differ += bool(differences)
    assert num_differ <= MAX_SEQUENCES_THAT_DIFFER


@pytest.mark.slow
async def test_all_at_once(reference, prompts):
    outputs, _ = await generate(prompts)
    check(reference, prompts, outputs)


@pytest.mark.slow
async def test_each_alone(reference, prompts):
    """Each over the border of a page, and every third as far as above: a token alone takes the longest."""
    lengths = [NUM_NEW_TOKENS if index % 6 in (0, 5) else 17 for index in range(len(prompts))]
    engine = await Engine.start(EngineConfig(dtype="float32", device="cpu"))
    recorder = TokenRecorder(engine)
    try:
        for prompt, length in zip(prompts, lengths, strict=True):
            await engine.submit(greedy(prompt, length)).collect()
    finally:
        await engine.stop()
    check(reference, prompts, [recorder.outputs[tuple(prompt)] for prompt in prompts], lengths)


@pytest.mark.slow
async def test_in_a_pool_that_is_too_small(reference, prompts):
    # The longest prompt comes first and leaves little room: small ones start beside it, all grow, and the
    # latest have to go again and again.
    prompts = [prompts[-1], *reversed(prompts[:12]), *prompts[12:-1]]
    outputs, num_preemptions = await generate(prompts, kv_tokens=3840, max_model_len=3100, overcommit=1.0)
    assert num_preemptions >= 5, (
        f"the pool is not small enough to show anything: {num_preemptions} preemptions"
    )
    check(reference, prompts, outputs)


@pytest.mark.slow
async def test_other_page_sizes_and_budgets(reference, prompts):
    short = prompts[2:14:2]
    for page_size, token_budget, run_ahead in ((1, 64, 0), (64, 33, 1)):
        outputs, _ = await generate(
            short,
            page_size=page_size,
            token_budget=token_budget,
            run_ahead=run_ahead,
            kv_tokens=4096,
            prefix_cache=page_size == 1,
        )
        check(reference, short, outputs)


@pytest.mark.slow
async def test_log_probabilities(reference, prompts):
    """Of prompt and output, in chunks, beside others, and for what the prefix cache would have known."""
    short = [prompts[index] for index in (1, 8, 15)]
    sampling = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        ignore_eos=True,
        logprobs=3,
        skip_special_tokens=False,
    )
    engine = await Engine.start(EngineConfig(dtype="float32", device="cpu", token_budget=60))
    try:
        requests = [
            Request(str(index), tuple(prompt), sampling, readouts=(PromptLogprobs(3),))
            for index, prompt in enumerate(short)
        ]
        await engine.submit(requests[-1]).collect()
        deltas = await asyncio.gather(*(engine.submit(request).collect() for request in requests))
    finally:
        await engine.stop()
    for prompt, delta in zip(short, deltas, strict=True):
        tokens = [*delta.prompt_tokens, *delta.tokens]
        token_ids = [token.piece.token_id for token in tokens]
        assert token_ids[: len(prompt)] == prompt
        assert len(token_ids) == len(prompt) + 8
        assert delta.prompt_tokens[0].logprob is None, "nothing comes before it"
        with torch.inference_mode():
            expected = reference.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        for place, token in enumerate(tokens[1:]):
            assert token.logprob == pytest.approx(expected[place, token.piece.token_id].item(), abs=1e-3)
            values = [value for _, value in token.top]
            assert values == pytest.approx(expected[place].topk(3).values.tolist(), abs=1e-3)
            for piece, value in token.top:
                assert value == pytest.approx(expected[place, piece.token_id].item(), abs=1e-3)
        for place, token in enumerate(delta.prompt_tokens[1:]):
            own = expected[place, token.piece.token_id]
            least, most = ((expected[place] > own + margin).sum().item() + 1 for margin in (1e-3, -1e-3))
            assert least <= token.rank <= most


@pytest.mark.slow
async def test_from_the_prefix_cache(reference, prompts):
    """Every prompt a second time, as two samples that share its pages, and once with a turn added to it."""
    short = prompts[5:14:3]
    engine = await Engine.start(EngineConfig(dtype="float32", device="cpu", token_budget=100))
    recorder = TokenRecorder(engine)

    async def run(prompts: list[list[int]], n: int) -> list[int]:
        """Numbers of cached tokens, of the first sample of each."""
        groups = [engine.submit_group([greedy(p)] * n) for p in prompts]
        texts = await asyncio.gather(*(stream.collect() for streams in groups for stream in streams))
        assert len({text.text for text in texts}) == len(prompts), "all samples are greedy"
        check(reference, prompts, [recorder.outputs[tuple(prompt)] for prompt in prompts])
        return [streams[0].num_cached_tokens for streams in groups]

    try:
        assert await run(short, n=1) == [0] * len(short)
        turns = [[*prompt, *recorder.outputs[tuple(prompt)], *prompt[:5]] for prompt in short]
        assert await run(short, n=2) == [(len(prompt) - 1) // 16 * 16 for prompt in short]
        cached = [(len(prompt) + NUM_NEW_TOKENS - 1) // 16 * 16 for prompt in short]
        assert await run(turns, n=1) == cached
    finally:
        await engine.stop()
