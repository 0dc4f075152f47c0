"""Steps as graphs: the same logits, pages and answers, whatever a step is padded to.

There are no CUDA graphs here: a capture is kept as the call it would have recorded, and a replay calls it.
The kernels run in Triton's interpreter, since their torch twins read on the host what a graph reads on the
device. tests/gpu/test_steps.py has the real ones.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.device import decode_graphs, mixed_graphs
from engine.device.batch import build_batch
from engine.device.decode_graphs import DecodeGraphs
from engine.device.mixed_graphs import LARGEST_SIZE, MixedGraphs, graph_sizes, padded_size
from engine.device.runner import ModelRunner
from engine.device.slots import StateSlots
from engine.outputs import Row, RowReadout, SlotInit, StepOutput, StepPlan
from engine.readouts import PromptLogprobs
from engine.request import SamplingParams
from kernels.dispatch import HAS_TRITON, forced
from kernels.kv_layer import KVLayer
from kernels.paged_attention import AttentionBatch
from models.forward_batch import ForwardBatch
from models.loader import random_decoder
from models.shapes import SHAPES

PAGE_SIZE = 16
NUM_PAGES = 32


@pytest.fixture
def model():
    with torch.inference_mode():
        yield random_decoder(SHAPES["tiny"], torch.float32, torch.device("cpu"))


def keep(pool: object, compute: Callable[[], Any]) -> tuple[SimpleNamespace, Any]:
    """The call in place of its graph: replayed, its result is put where that of the first call is."""
    result = compute()

    def replay() -> None:
        for place, tensor in zip(tensors(result), tensors(compute()), strict=True):
            place.copy_(tensor)

    return SimpleNamespace(replay=replay), result


def tensors(result: Any) -> list[torch.Tensor]:
    """All that a (nested) tuple holds."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None else [tensor for part in result for tensor in tensors(part)]


@pytest.fixture
def no_capture(monkeypatch):
    for module in (decode_graphs, mixed_graphs):
        monkeypatch.setattr(module, "capture", keep)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def caches(model) -> list[KVLayer]:
    heads = model.spec.layers[0].attention
    shape = (NUM_PAGES + 1, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    generator = torch.Generator().manual_seed(1)
    return [
        KVLayer(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in model.spec.layers
    ]


def batch(rows: list[tuple[int, int]]) -> ForwardBatch:
    """Rows of (tokens computed before, tokens of this step), those with one token first."""
    pages = torch.arange(NUM_PAGES).view(len(rows), -1)
    positions = [torch.arange(start, start + length) for start, length in rows]
    slots = [
        table[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
        for table, place in zip(pages, positions, strict=True)
    ]
    lengths = [length for _, length in rows]
    ends = torch.tensor(lengths).cumsum(0)
    attention = AttentionBatch(
        page_table=pages.to(torch.int32),
        query_start=torch.cat((torch.zeros(1), ends)).to(torch.int32),
        context_lens=torch.tensor([start + length for start, length in rows], dtype=torch.int32),
        slot_mapping=torch.cat(slots),
        num_decode_rows=lengths.count(1),
    )
    token_ids = torch.randint(0, 100, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    return ForwardBatch(token_ids, torch.cat(positions), (attention,), hidden_indices=ends - 1)


def plan(rows: list[tuple[int, int]], slots: StateSlots) -> StepPlan:
    """The same step, each row in a slot of its own: rows with one token continue what stands in `slots`."""
    step = batch(rows)
    num_decode = sum(length == 1 for _, length in rows)
    slots.page_table[:, :-1] = 0  # a row reads only the pages set here and its new ones
    tables = torch.arange(NUM_PAGES).view(len(rows), -1)
    slots.page_table[0, :num_decode, : tables.shape[1]] = tables[:num_decode]
    slots.last_token[:num_decode] = step.token_ids[:num_decode]
    planned, first = (
        [Row(index, index, start) for index, (start, _) in enumerate(rows[:num_decode])],
        num_decode,
    )
    for index, (start, length) in enumerate(rows[num_decode:], num_decode):
        tokens = tuple(step.token_ids[first : first + length].tolist())
        init = SlotInit(SamplingParams(max_tokens=1), 0, tokens, ())
        pages = (tuple(tables[index].tolist()),)
        planned.append(Row(index, index, start, tokens, new_pages=pages, init=init))
        first += length
    return StepPlan.of(0, planned)


interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton and TRITON_INTERPRET=1"
)


@interpreted
@pytest.mark.parametrize(
    "rows", [[(0, 16)], [(9, 1), (0, 7)], [(9, 1), (17, 1), (0, 4), (16, 9)], [(100, 1)]]
)
def test_a_graph_computes_what_the_model_computes(model, no_capture, rows):
    whole, captured = caches(model), caches(model)
    slots = StateSlots(
        5, max_pages=NUM_PAGES, padding_page=NUM_PAGES, vocab_size=100, eos_token_ids=(), device=model.device
    )
    logits = torch.zeros(5, model.spec.vocab_size)
    mixed = MixedGraphs(
        model,
        captured,
        token_budget=16,
        max_num_seqs=5,
        slots=slots,
        staging=torch.zeros(3, 5, dtype=torch.int64),
        logits=logits,
    )

    def compute(rows: list[tuple[int, int]]) -> None:
        step = plan(rows, slots)
        graph = mixed.graph_for(step.num_tokens, len(rows))
        assert graph is not None
        build_batch(step, slots, PAGE_SIZE, model.device, graph.inputs)
        graph.layers.replay()
        mixed.replay_tail(len(rows))

    with forced("triton"):
        mixed.capture()
        compute([(30, 1), (0, 1), (0, 5), (8, 9)])  # leaves its tokens and rows behind
        for layer, old in zip(captured, whole, strict=True):
            for tensor, old_tensor in zip(layer.tensors, old.tensors, strict=True):
                tensor.copy_(old_tensor)
        compute(rows)
    torch.testing.assert_close(logits[: len(rows)], model.logits(model(batch(rows), whole)))
    for own, other in zip(captured, whole, strict=True):
        for tensor, expected in zip(own.tensors, other.tensors, strict=True):
            # the page of no sequence aside
            torch.testing.assert_close(tensor[:NUM_PAGES], expected[:NUM_PAGES])


def answers(runner: ModelRunner) -> list[StepOutput]:
    """Sequences that join and decode, one in two pieces, one with a bias, one with prompt logprobs."""
    lengths: dict[int, int] = {}
    seeded = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9)
    edited = SamplingParams(max_tokens=9, logit_bias=((17, 5.0),), min_tokens=4, logprobs=3)

    def row(slot: int, tokens: range, sampling: SamplingParams | None, **more: Any) -> Row:
        start = lengths.get(slot, 0)
        lengths[slot] = start + len(tokens)
        pages = () if sampling is None else ((2 * slot, 2 * slot + 1),)
        init = None if sampling is None else SlotInit(sampling, 11, tuple(tokens), ())
        return Row(slot, slot, start, tuple(tokens), new_pages=pages, init=init, **more)

    def step(decoding: list[int], *rows: Row) -> StepOutput:
        decode = [Row(slot, slot, lengths[slot]) for slot in decoding]
        for slot in decoding:
            lengths[slot] += 1
        return runner.launch(StepPlan.of(0, [*decode, *rows])).wait()

    readouts = (RowReadout(PromptLogprobs(2), 0, 3, (31, 32, 33), False),)
    return [
        step([], row(0, range(5, 11), seeded)),
        step([0], row(1, range(20, 27), seeded, num_logits=0)),
        step([0], row(2, range(40, 41), edited), row(1, range(27, 34), None)),
        step([1, 0, 2], row(3, range(30, 35), seeded, readouts=readouts)),
        step([], row(0, range(60, 70), seeded, num_logits=0)),
        step([2, 3, 1], row(0, range(70, 72), None)),
    ]


def told(output: StepOutput) -> list[float]:
    """All log-probabilities of a step."""
    rows = [entry for row in output.logprobs or () for entry in row if entry is not None]
    values = [value for entry in rows for value in (entry.logprob, *(value for _, value in entry.top))]
    for results in output.readouts.values():
        for columns in results:
            values += [*columns.logprobs.tolist(), *columns.top.ravel().tolist()]
    return values


@interpreted
def test_a_runner_with_graphs_gives_the_answers_of_one_without(model, no_capture, monkeypatch):
    monkeypatch.setattr(DecodeGraphs, "_forward", lambda self, size: None)  # here they sample, no more
    layers = MixedGraphs._compute

    def interpreted_layers(*args: Any) -> None:
        with forced("triton"):
            layers(*args)

    monkeypatch.setattr(MixedGraphs, "_compute", interpreted_layers)  # all else works as its twins, too
    settings = EngineConfig(device="cpu", kv_tokens=8 * PAGE_SIZE, max_model_len=32, max_num_seqs=4)
    plain, replaying = (ModelRunner.around(model, settings, 16, (3,)) for _ in range(2))
    decode = DecodeGraphs(model, replaying._kv_cache.layers, replaying._slots, replaying._sampler, 4)
    mixed = MixedGraphs(
        model,
        replaying._kv_cache.layers,
        token_budget=16,
        max_num_seqs=4,
        slots=replaying._slots,
        staging=decode.staging,
        logits=decode.logits,
    )
    decode.capture()
    mixed.capture()
    tails, replay_tail = [], mixed.replay_tail
    monkeypatch.setattr(mixed, "replay_tail", lambda size: (tails.append(size), replay_tail(size)))
    replaying._graphs, replaying._mixed_graphs = decode, mixed
    found, expected = answers(replaying), answers(plain)
    assert tails == [1, 1, 3, 4], "steps with readouts, or without samples, replay no tail"
    assert [step.tokens for step in found] == [step.tokens for step in expected]
    for step, other in zip(found, expected, strict=True):
        assert told(step) == pytest.approx(told(other), abs=1e-4)
    assert [len(told(step)) for step in found] == [0, 0, 4, 9 + 4, 0, 4]


def test_a_step_is_padded_by_little_or_not_captured():
    sizes = graph_sizes(10_000)
    assert sizes[-1] == 10_000 and sizes == sorted(set(sizes))
    for num_tokens in range(1, 10_001):
        size = padded_size(sizes, num_tokens)
        if num_tokens <= LARGEST_SIZE:
            assert 0 <= size - num_tokens < max(64, num_tokens / 4)
        else:
            assert size == (10_000 if num_tokens == 10_000 else None)
    assert padded_size(sizes, LARGEST_SIZE) == LARGEST_SIZE
    assert padded_size(sizes, 10_001) is None


@pytest.mark.parametrize("budget", [1, 40, 64, 100, 1024, 1500])
def test_the_largest_size_is_the_budget(budget):
    sizes = graph_sizes(budget)
    assert sizes[-1] == budget and padded_size(sizes, budget) == budget
    assert padded_size(sizes, budget + 1) is None
