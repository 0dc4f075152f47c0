"""Float32 attention over what a CPU's cache holds: float32, bfloat16 or int8.

Covers kernels/cpu/attention_merge.py, kernels/cpu/decode_attention.py, kernels/cpu/prefill_attention.py,
kernels/cpu/kv_heads.py and kernels/cpu/rope_kv_write.py.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.cpu.compiler import get_num_threads, set_num_threads
from kernels.dispatch import forced
from kernels.kv_layer import KVLayer
from kernels.kv_values import quantize
from kernels.paged_attention import paged_attention
from kernels.rope_kv_write import rope_kv_write
from tests.kernels.attention_cases import Case, exact_attention, make_alone, make_case
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

ROWS = [*((1, n) for n in (1, 15, 64, 65, 200, 700)), (5, 33), (70, 130), (2, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


@pytest.fixture(autouse=True)
def _on_a_cpu(target: Target) -> None:
    if target.backend == "triton":
        pytest.skip("GPUs keep activations and cache in one dtype")


def stored_as(kv: KVLayer, dtype: torch.dtype) -> tuple[KVLayer, KVLayer]:
    """Return `kv` in a dtype, and what that stands for in float32."""
    if dtype != torch.int8:
        stored = replace(kv, keys=kv.keys.to(dtype), values=kv.values.to(dtype))
        return stored, KVLayer(stored.keys.float(), stored.values.float())
    tensors = []
    for x in kv.tensors:
        numbers, scales = quantize(x.nan_to_num().flatten(0, 1), "int8")
        # Of two scales a head may have, it uses the first.
        scales = torch.cat((scales, torch.full_like(scales, torch.nan)), -1)
        tensors.append((numbers.view(x.shape), scales.view(*x.shape[:3], 2)))
    (keys, key_scales), (values, value_scales) = tensors
    read = [n.float() * scales[..., :1].float() for n, scales in tensors]
    return KVLayer(keys, values, key_scales, value_scales), KVLayer(*read)


def make(dtype: torch.dtype, head_dim: int = 64) -> tuple[Case, torch.Tensor]:
    """Return a step of rows over a cache in a dtype, and its exact result."""
    case = make_case(ROWS, num_heads=9, num_kv_heads=3, head_dim=head_dim, page_size=16, dtype=torch.float32)
    stored, read = stored_as(case.kv, dtype)
    return replace(case, kv=stored), exact_attention(replace(case, kv=read), case.options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_rows_read_what_is_stored(target: Target, dtype: torch.dtype, head_dim: int):
    case, exact = make(dtype, head_dim)
    result = paged_attention(case.q, case.kv, case.batch, case.options)
    assert_close(result, exact, torch.float32, reduction=head_dim + 700)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_and_threads_change_no_bit(target: Target, dtype: torch.dtype):
    if target.backend == "torch":
        pytest.skip("the twin's products may depend on their size")
    case, _ = make(dtype)
    together = paged_attention(case.q, case.kv, case.batch, case.options)
    threads = get_num_threads()
    try:
        for num_threads in (1, 2):
            set_num_threads(num_threads)
            batch = replace(case.batch)
            again = paged_attention(case.q, case.kv, batch, case.options)
            assert torch.equal(again, together), f"{num_threads} threads change the result"
    finally:
        set_num_threads(threads)
    start = 0
    for row, (num_queries, length) in enumerate(ROWS):
        alone = make_alone(case, row, num_queries, length, start)
        result = paged_attention(alone.q, case.kv, alone.batch, case.options)
        expected = together[start : start + num_queries]
        assert torch.equal(result, expected), f"row {row} depends on its neighbours"
        start += num_queries


LENGTH = 600
CUTS = {  # tokens of a sequence that each step computes
    "each alone": [1] * LENGTH,
    "a budget that leaves one": [63, 1] * 9 + [24],
    "a prefix hit that leaves one": [LENGTH - 1, 1],
    "a preempted answer": [450, *[1] * 50, 100],
    "drafts": [2, 3, 5] * 60,
    "chunks": [64, 65, 1, 127, 129, 33, 181],
}
OPTIONS = {  # and the heads of queries, those of keys, and their size
    "plain": (AttentionOptions(0.125), (9, 3, 64)),
    "one key head": (AttentionOptions(0.2), (5, 1, 20)),
    "sinks": (AttentionOptions(0.2, sinks=torch.tensor([1.0, -torch.inf, 30, 0])), (4, 4, 32)),
    "window": (AttentionOptions(0.1, window=50), (4, 2, 128)),
    "all": (AttentionOptions(0.2, 200, 1.5, sinks=torch.tensor([1.0, 2.0, -3.0, 0.0])), (4, 2, 80)),
}


def rows_of_one(case: Case, cut: list[int]) -> Case:
    """Return a step whose rows are parts of the only row of a case, those of one query first."""
    ends = torch.tensor(cut).cumsum(0).tolist()
    parts = sorted(pairwise([0, *ends]), key=lambda part: part[1] - part[0] > 1)
    lens, context_lens = [end - start for start, end in parts], [end for _, end in parts]
    order = torch.cat([torch.arange(*part) for part in parts])
    batch = AttentionBatch(
        case.batch.page_table.expand(len(parts), -1).contiguous(),
        torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
        case.batch.slot_mapping[order],
        lens.count(1),
        lens,
        context_lens,
    )
    return replace(case, q=case.q[order], batch=batch)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_a_sequence_is_cut_into_steps_changes_no_bit(target: Target, dtype: torch.dtype, kind: str):
    """All parts are rows of one step here: neighbours change nothing either."""
    if target.backend == "torch":
        pytest.skip("the twin's products may depend on their size")
    options, (num_heads, num_kv_heads, head_dim) = OPTIONS[kind]
    case = make_case(
        [(LENGTH, LENGTH)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.float32,
    )
    case = replace(case, kv=stored_as(case.kv, dtype)[0], options=options)
    whole = paged_attention(case.q, case.kv, case.batch, options)
    assert whole.isfinite().all()
    for name, cut in CUTS.items():
        assert sum(cut) == LENGTH, name
        parts, expected = rows_of_one(case, cut), rows_of_one(replace(case, q=whole), cut).q
        result = paged_attention(parts.q, case.kv, parts.batch, options)
        differs = (result != expected).flatten(1).any(1)
        assert not differs.any(), f"{name}: {int(differs.sum())} of {LENGTH} tokens differ"


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_keys_and_values_are_rounded_to_the_cache(target: Target, dtype: torch.dtype, num_tokens: int):
    """3 tokens are computed by one thread, 40 are shared out."""
    q, k, v = (torch.randn(num_tokens, heads, 20) for heads in (4, 2, 2))
    turns = torch.randn(num_tokens, 2, 10)
    slots = torch.randperm(64)[:num_tokens]
    exact_k, exact_v = k.clone(), v.clone()
    kept = KVLayer(torch.zeros(4, 16, 2, 20), torch.zeros(4, 16, 2, 20))
    with forced("torch"):
        rope_kv_write(q.clone(), exact_k, v, turns, kept, slots)
    kv, expected = stored_as(kept, dtype)
    kv = replace(kv, keys=torch.zeros_like(kv.keys), values=torch.zeros_like(kv.values))
    rope_kv_write(q, k, v, turns, kv, slots)
    assert torch.equal(v, exact_v), "v itself is not changed"
    for name, stored, scales in (("keys", kv.keys, kv.key_scales), ("values", kv.values, kv.value_scales)):
        read = stored.float() if scales is None else stored.float() * scales[..., :1].float()
        wanted = getattr(expected, name)
        # Fused multiply-adds may turn a rotated value to the other neighbour.
        step = wanted.abs().amax(-1, keepdim=True) / (120 if scales is None else 100)
        assert ((read - wanted).abs() <= step).all(), f"{name} are not rounded to the nearest"
