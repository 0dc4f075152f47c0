"""Steps as graphs: the same hidden states and the same pages, whatever a step is padded to.

There are no CUDA graphs here: a capture is kept as the call it would have recorded, and a replay calls it.
The kernels run in Triton's interpreter, since their torch twins read on the host what a graph reads on the
device. tests/gpu/test_steps.py has the real ones.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from engine.device import mixed_graphs
from engine.device.batch import build_batch
from engine.device.mixed_graphs import LARGEST_SIZE, MixedGraphs, graph_sizes, padded_size
from engine.device.slots import StateSlots
from engine.outputs import NO_PAGE, DecodeRows, Row, SlotInit, StepPlan
from engine.request import SamplingParams
from kernels.dispatch import HAS_TRITON, forced
from kernels.paged_attention import AttentionBatch
from models.decoder import ForwardBatch
from models.loader import random_decoder
from models.shapes import SHAPES

PAGE_SIZE = 16
NUM_PAGES = 32


@pytest.fixture
def model():
    with torch.inference_mode():
        yield random_decoder(SHAPES["tiny"], torch.float32, torch.device("cpu"))


@pytest.fixture
def no_capture(monkeypatch):
    monkeypatch.setattr(mixed_graphs, "capture", lambda pool, call: (SimpleNamespace(replay=call), None))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def caches(model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    heads = model.spec.layers[0].attention
    shape = (NUM_PAGES + 1, PAGE_SIZE, heads.num_kv_heads, heads.head_dim)
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
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
    return ForwardBatch(token_ids, torch.cat(positions), attention, wanted=ends - 1)


def plan(rows: list[tuple[int, int]], slots: StateSlots) -> StepPlan:
    """The same step, each row in a slot of its own: rows with one token continue what stands in `slots`."""
    step = batch(rows)
    num_decode = sum(length == 1 for _, length in rows)
    slots.page_table.zero_()  # a row's pages are what it continues, and what it is told
    tables = torch.arange(NUM_PAGES).view(len(rows), -1)
    slots.page_table[:num_decode, : tables.shape[1]] = tables[:num_decode]
    slots.last_token[:num_decode] = step.token_ids[:num_decode]
    indices = list(range(num_decode))
    decode = DecodeRows(indices, indices, [start for start, _ in rows[:num_decode]], [NO_PAGE] * num_decode)
    chunks, first = [], num_decode
    for index, (start, length) in enumerate(rows[num_decode:], num_decode):
        tokens = tuple(step.token_ids[first : first + length].tolist())
        init = SlotInit(SamplingParams(max_tokens=1), 0, tokens, ())
        chunks.append(Row(index, index, start, tokens, True, tuple(tables[index].tolist()), init))
        first += length
    return StepPlan(0, decode, tuple(chunks), first)


@pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1", reason="needs triton and TRITON_INTERPRET=1"
)
@pytest.mark.parametrize(
    "rows", [[(0, 16)], [(9, 1), (0, 7)], [(9, 1), (17, 1), (0, 4), (16, 9)], [(100, 1)]]
)
def test_a_graph_computes_what_the_model_computes(model, no_capture, rows):
    whole, captured = caches(model), caches(model)
    slots = StateSlots(
        5, max_pages=NUM_PAGES, dummy_page=NUM_PAGES, vocab_size=100, eos_token_ids=(), device=model.device
    )
    graphs = MixedGraphs(
        model,
        captured,
        token_budget=16,
        max_num_seqs=5,
        max_pages=NUM_PAGES,
        dummy_slot=NUM_PAGES * PAGE_SIZE,
    )

    def compute(rows: list[tuple[int, int]]) -> torch.Tensor:
        step = plan(rows, slots)
        graph = graphs.graph_for(step.num_tokens)
        assert graph is not None
        staged = build_batch(step, slots, PAGE_SIZE, model.device, graph.inputs)
        graph.layers.replay()
        return model.end(graph.mixed, graph.residual, staged.wanted)

    with forced("triton"):
        graphs.capture()
        compute([(30, 1), (0, 1), (0, 5), (8, 9)])  # leaves its tokens and rows behind
        for (keys, values), (old_keys, old_values) in zip(captured, whole, strict=True):
            keys.copy_(old_keys)
            values.copy_(old_values)
        hidden = compute(rows)
    torch.testing.assert_close(hidden, model(batch(rows), whole))
    for own, other in zip(captured, whole, strict=True):
        for kind in (0, 1):  # but for the page that nobody owns
            torch.testing.assert_close(own[kind][:NUM_PAGES], other[kind][:NUM_PAGES])


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
