"""Paged attention against a plain float64 attention.

Covers kernels/attention_batch.py, kernels/attention_tile.py, kernels/cpu/attention_splits.py,
kernels/cpu/attention_tiles.py and kernels/cpu/prefill_attention.py.
"""

import dataclasses

import pytest
import torch

from kernels.decode_attention import decode_attention_triton, launch_shape
from kernels.paged_attention import AttentionBatch, AttentionOptions, paged_attention
from tests.kernels.attention_cases import exact_attention, make_alone, make_case
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 50), (2, 2), (5, 33), (17, 17), (40, 71)]
LARGE_DECODE = [(1, n) for n in (255, 256, 257, 512, 4096, 8191, 8192, 8193, 9000)]
LARGE_PREFILL = [(2, 8000), (513, 513), (1024, 3000)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(target: Target, rows, heads=(4, 2), head_dim=64, page_size=16, dtype=torch.float32, **options):
    if dtype == torch.bfloat16 and target.backend == "triton" and target.device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    case = make_case(
        rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    case.options = case.options._replace(**options)
    exact = exact_attention(case, case.options)
    moved = case.to(target.device)
    result = paged_attention(moved.q, moved.kv, moved.batch, moved.options)
    longest = max(length for _, length in rows)
    assert_close(result, exact, dtype, reduction=head_dim + longest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch(target: Target, dtype: torch.dtype):
    check(
        target,
        [*MIXED[:5], *LARGE_DECODE * target.large, *MIXED[5:], *LARGE_PREFILL * target.large],
        dtype=dtype,
    )


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_page_sizes(target: Target, page_size: int):
    lengths = sorted({1, max(1, page_size - 1), page_size, page_size + 1, 3 * page_size + 1})
    rows = [(1, n) for n in lengths] + [(n, n) for n in lengths if n > 1] + [(2, n + 1) for n in lengths]
    check(target, rows, page_size=page_size)


@pytest.mark.parametrize("group", [1, 3, 4, 6, 7, 8])
def test_groups(target: Target, group: int):
    check(target, [(1, 5), (1, 20), (3, 19), (18, 18)], heads=(2 * group, 2))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(target: Target, head_dim: int):
    check(target, [(1, 5), (1, 20), (3, 19), (18, 18)], head_dim=head_dim)


@pytest.mark.parametrize("window", [1, 7, 16, 1000])
def test_window(target: Target, window: int):
    check(target, MIXED, window=window)


@pytest.mark.parametrize("softcap", [0.7, 30.0])
def test_softcap(target: Target, softcap: float):
    check(target, MIXED, softcap=softcap)


# Of about the size of a score, of no weight at all, and so large that the keys have none.
SINKS = torch.tensor([0.3, -1.5, -torch.inf, 30.0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 7])
def test_sinks(target: Target, dtype: torch.dtype, window: int):
    check(target, MIXED, dtype=dtype, window=window, sinks=SINKS)


def test_a_sink_joins_a_row_of_several_splits_once(target: Target):
    check(target, [(1, 700), (1, 130), (1, 3), (150, 700)], sinks=SINKS)


def test_all_options_together(target: Target):
    check(target, MIXED, window=9, softcap=1.5, sinks=SINKS)


@pytest.mark.parametrize("rows", [[(1, 700)], [(1, 700), (1, 130), (1, 129), (1, 3)], [(150, 700)]])
def test_several_splits_and_tiles(target: Target, rows):
    check(target, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_alone_equals_the_row_in_a_batch(target: Target, dtype: torch.dtype):
    if dtype == torch.bfloat16 and target.backend == "triton" and target.device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    case = make_case(MIXED, num_heads=6, num_kv_heads=2, head_dim=64, page_size=16, dtype=dtype).to(
        target.device
    )
    together = paged_attention(case.q, case.kv, case.batch, case.options)
    start = 0
    for row, (n, length) in enumerate(MIXED):
        alone = make_alone(case, row, n, length, start)
        single = paged_attention(alone.q, case.kv, alone.batch, case.options)
        expected = together[start : start + n]
        if target.backend == "triton" or (target.backend == "cpu" and dtype == torch.float32):
            assert torch.equal(single, expected), f"row {row} depends on its neighbours"
        else:
            assert_close(single, expected, dtype, reduction=length)
        start += n


@pytest.mark.parametrize("window", [0, 500])
@pytest.mark.parametrize("sinks", [False, True])
def test_how_splits_map_to_programs_changes_no_bit(target: Target, window: int, sinks: bool):
    if target.backend != "triton":
        pytest.skip("has no programs")
    heads, copies = ((32, 8), 16) if target.large else ((4, 2), 1)
    rows = [(1, n) for n in (700, 128, 1, 640, 4200)] * copies
    dtype = torch.bfloat16 if target.large else torch.float32
    case = make_case(
        rows, num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, page_size=16, dtype=dtype
    ).to(target.device)
    options = case.options._replace(window=window)
    if sinks:
        options = options._replace(sinks=torch.randn(heads[0], device=target.device))
    results = []
    for programs_per_sm in (1, 3, 32):
        out = torch.full_like(case.q, torch.nan)
        launch = launch_shape(64, dtype.itemsize)._replace(programs_per_sm=programs_per_sm)
        batch = dataclasses.replace(case.batch)
        decode_attention_triton(case.q, case.kv, batch, out, options, launch=launch)
        results.append(out)
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("window", [0, 20])
def test_row_count_known_only_to_the_device(target: Target, window: int):
    """As in a captured step with prompts: rows and tokens may be fewer than there is room for."""
    if target.backend != "triton":
        pytest.skip("is never captured")
    rows = [(1, 40), (1, 7), (5, 33), (17, 17), (2, 50)]
    case = make_case(rows, num_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32).to(
        target.device
    )
    known, num_tokens = case.batch, case.q.shape[0]

    def padded(tensor: torch.Tensor, value: int, count: int) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), value)))

    q = torch.cat((case.q, torch.full_like(case.q[:9], torch.nan)))
    batch = AttentionBatch(
        page_table=padded(known.page_table, 0, 4),
        query_start=padded(known.query_start, num_tokens, 4),
        context_lens=padded(known.context_lens, 99, 4),
        slot_mapping=known.slot_mapping,
        num_decode_rows=len(rows) + 4,
        num_rows=torch.tensor([len(rows)], dtype=torch.int32, device=q.device),
    )
    out = torch.full_like(q, 7.0)
    options = case.options._replace(window=window)
    paged_attention(q, case.kv, batch, options, out)
    expected = paged_attention(case.q, case.kv, known, options)
    assert torch.equal(out[:num_tokens], expected)
    assert torch.equal(out[num_tokens:], torch.full_like(out[num_tokens:], 7.0)), "padding was written to"


@pytest.mark.gpu
def test_a_captured_decode_step_follows_the_lengths_it_is_replayed_with():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    rows = [(1, n) for n in (1, 17, 256, 257, 600, 3000, 8192, 9000)]
    case = make_case(rows, num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, dtype=torch.bfloat16).to(
        torch.device("cuda")
    )
    lens = case.batch.context_lens.clone()

    def step(context_lens: torch.Tensor, host: list[int] | None) -> list[torch.Tensor]:
        batch = AttentionBatch(
            case.batch.page_table,
            case.batch.query_start,
            context_lens,
            case.batch.slot_mapping,
            num_decode_rows=len(rows),
            query_lens=None if host is None else [1] * len(rows),
            context_lens_host=host,
        )
        # Two layers: the second needs the scratch memory as the first found it.
        return [paged_attention(case.q, case.kv, batch, AttentionOptions(scale)) for scale in (0.1, 0.2)]

    step(lens, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(lens, None)
    for divisor in (1, 2, 7, 1):
        shorter = [max(1, length // divisor) for _, length in rows]
        lens.copy_(torch.tensor(shorter, dtype=torch.int32))
        for _ in range(3):
            graph.replay()
        for result, expected in zip(captured, step(lens, shorter), strict=True):
            assert torch.equal(result, expected), f"replay differs at lengths {shorter}"
