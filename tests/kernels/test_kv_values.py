"""Quantized keys and values: what is stored, and attention that reads it.

Covers kernels/kv_layer.py and kernels/kv_values.py.
"""

from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.kv_layer import KVLayer, KVStorage, num_groups
from kernels.kv_values import quantize, read_heads, write_heads
from kernels.paged_attention import paged_attention
from kernels.rope_kv_write import rope_kv_write
from tests.kernels.attention_cases import exact_attention, make_case
from tests.kernels.conftest import Target
from tests.kernels.tolerances import assert_close

KINDS = ["fp8", "int8", "int4"]
# Error of a value, as a share of the largest of its head: half a unit in the last of 3 bits, half a step
# of 127, half a step of 15 over twice the range; and the rounding of a scale to float16.
ERRORS = {"fp8": 2.0**-4, "int8": 0.51 / 127, "int4": 0.51 * 2 / 15}
ROWS = [(1, 1), (1, 15), (1, 17), (1, 50), (1, 300), (2, 2), (5, 33), (40, 71)]


def empty_layer(kind, num_pages, page_size, num_kv_heads, head_dim, scales=(1.0, 1.0)) -> KVLayer:
    """Pages whose bytes are all ones: NaN in the scales and in fp8."""
    storage = KVStorage.of(kind, torch.float32, {head_dim})
    pages = storage.allocate(
        num_pages, page_size * num_kv_heads * head_dim, lambda dtype, *shape: torch.zeros(shape, dtype=dtype)
    )
    for tensor in pages:
        tensor.view(torch.uint8).fill_(255)
    return storage.layer(pages, page_size, num_kv_heads, head_dim, *scales)


def moved(kv: KVLayer, device: torch.device) -> KVLayer:
    return KVLayer(
        *(tensor.to(device) for tensor in kv.tensors), key_scale=kv.key_scale, value_scale=kv.value_scale
    )


def read_all(kv: KVLayer, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values, fp32 [num_pages, page_size, num_kv_heads, head_dim]."""
    kv = moved(kv, torch.device("cpu"))
    shape = (*kv.keys.shape[:3], head_dim)
    index = torch.arange(kv.keys.shape[:3].numel())
    keys = read_heads(kv.keys, kv.key_scales, index, head_dim) * kv.key_scale
    values = read_heads(kv.values, kv.value_scales, index, head_dim) * kv.value_scale
    return keys.view(shape), values.view(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "page_size"),
    [
        ((4, 2), 64, 64, 16),
        ((9, 3), 80, 32, 1),
        ((7, 1), 20, 20, 16),
        ((2, 2), 96, 0, 32),
        ((5, 5), 256, 256, 16),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_writes_what_the_float_cache_would_hold(
    target: Target, kind, heads, head_dim, rotary_dim, page_size, interleaved
):
    num_heads, num_kv_heads = heads
    scales = (0.5, 0.03) if kind == "fp8" else (1.0, 1.0)
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = torch.randn(7, sum(sizes), head_dim).split(sizes, 1)
    v[2] = 0.0
    slots = torch.randperm(4 * 16)[:7]
    angles = torch.rand(7, 2, rotary_dim // 2) if rotary_dim else None
    kv = empty_layer(kind, 64 // page_size, page_size, num_kv_heads, head_dim, scales)
    before = [tensor.clone() for tensor in kv.tensors]
    kv = moved(kv, target.device)
    shape = (64 // page_size, page_size, num_kv_heads, head_dim)
    plain = KVLayer(torch.zeros(shape, device=target.device), torch.zeros(shape, device=target.device))
    results = []
    for layer in (plain, kv):
        parts = torch.cat((q, k, v), 1).to(target.device).split(sizes, 1)
        on_device = None if angles is None else angles.to(target.device)
        rope_kv_write(*parts, on_device, layer, slots.to(target.device), interleaved=interleaved)
        results.append(parts[0])
    assert torch.equal(*results), "queries do not depend on the storage of keys"
    for stored, exact, scale in zip(read_all(kv, head_dim), plain.tensors, scales, strict=True):
        stored, exact = (x.view(-1, num_kv_heads, head_dim)[slots] for x in (stored, exact.cpu()))
        largest = exact.abs().amax(-1, keepdim=True)
        is_near = (stored - exact).abs() <= ERRORS[kind] * largest + 1e-6
        if kind == "fp8" and target.backend == "triton" and target.device.type == "cpu":
            # Triton's interpreter loses the carry of a value that is rounded up to a power of two.
            rounded = (exact / scale).to(torch.float8_e4m3fn).float().abs()
            is_near |= (rounded.frexp().mantissa == 0.5) & (rounded > (exact / scale).abs())
        assert is_near.all()
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    for tensor, old in zip(kv.tensors, before, strict=True):
        new_rows, old_rows = (x.cpu().view(torch.uint8).view(64, -1)[untouched] for x in (tensor, old))
        assert torch.equal(new_rows, old_rows), "only the given slots are written"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((9, 3), 80), ((7, 1), 20), ((2, 2), 256)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9, "softcap": 1.5, "sinks": True}],
    ids=["plain", "window, soft cap and sinks"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_is_that_of_the_dequantized_cache(target: Target, kind, heads, head_dim, options, dtype):
    num_heads, num_kv_heads = heads
    case = make_case(
        ROWS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=16, dtype=dtype
    )
    sinks = torch.randn(num_heads) if "sinks" in options else None
    case.options = case.options._replace(**{**options, "sinks": sinks})
    scales = (0.5, 0.03) if kind == "fp8" else (1.0, 1.0)
    kv = empty_layer(kind, len(case.kv.keys), 16, num_kv_heads, head_dim, scales)
    keys, values = (x.view(-1, num_kv_heads, head_dim) for x in case.kv.tensors)
    slots = keys.isfinite().all(-1).all(-1).nonzero().view(-1)
    write_heads(kv, slots, keys[slots], values[slots])
    case.kv = KVLayer(*(x.to(dtype) for x in read_all(kv, head_dim)))
    exact = exact_attention(case, case.options)
    on_device = case.to(target.device)
    result = paged_attention(on_device.q, moved(kv, target.device), on_device.batch, on_device.options)
    assert_close(result, exact, dtype, reduction=head_dim + 300)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_a_batch(target: Target, kind):
    if target.backend == "torch":
        pytest.skip("the order of a library's sums may depend on the batch")
    rows = [(1, 40), (1, 300), (3, 40)]
    case = make_case(rows, num_heads=6, num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
    kv = empty_layer(kind, len(case.kv.keys), 16, 2, 64)
    keys, values = (x.view(-1, 2, 64) for x in case.kv.tensors)
    slots = keys.isfinite().all(-1).all(-1).nonzero().view(-1)
    write_heads(kv, slots, keys[slots], values[slots])
    kv, case = moved(kv, target.device), case.to(target.device)
    together = paged_attention(case.q, kv, case.batch, case.options)
    batch = case.batch
    batch.page_table, batch.context_lens = batch.page_table[1:2], batch.context_lens[1:2]
    batch.query_start, batch.num_decode_rows = batch.query_start[:2], 1
    batch.query_lens, batch.context_lens_host = [1], [300]
    batch._once.clear()
    assert torch.equal(paged_attention(case.q[1:2], kv, batch, case.options), together[1:2])


@given(head_dim=st.integers(1, 80).map(lambda n: 2 * n), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_four_bit_values_survive_packing(head_dim, scale, seed):
    """Numbers on the grid of their group are read as they were written."""
    generator = torch.Generator().manual_seed(seed)
    n = torch.randint(0, 16, (3, 2, head_dim), generator=generator).float()
    n[..., ::32], n[..., 1::32] = 0, 15  # each group has both ends
    n[..., -1] = 15 if head_dim % 32 == 2 else n[..., -1]
    step = torch.tensor(scale).half().float()
    stored, scales = quantize(n * step, "int4")
    assert stored.shape == (3, 2, head_dim // 2) and scales.shape == (3, 2, 2 * num_groups(head_dim))
    found = read_heads(stored.unsqueeze(0), scales.unsqueeze(0), torch.arange(6), head_dim)
    torch.testing.assert_close(found.view(3, 2, head_dim), n * step, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_bytes_beside_those_of_16_bits(kind, head_dim):
    storage = KVStorage.of(kind, torch.bfloat16, {head_dim})
    ratio = 2 * head_dim / storage.num_bytes(head_dim)
    assert ratio >= {"fp8": 2.0, "int8": 1.9, "int4": 3.0}[kind]


def test_heads_of_different_sizes_have_equally_many_scales_for_a_value():
    assert KVStorage.of("int8", torch.bfloat16, {256, 512}).scales_per_value == Fraction(1, 256)
    storage = KVStorage.of("int8", torch.bfloat16, {96, 128})
    assert storage.scales_per_value == Fraction(1, 32)
    pages = storage.allocate(2, 16 * 4 * 96, lambda dtype, *shape: torch.zeros(shape, dtype=dtype))
    for num_kv_heads, head_dim in ((4, 96), (3, 128)):
        layer = storage.layer(pages, 16, num_kv_heads, head_dim)
        assert layer.keys.shape == (2, 16, num_kv_heads, head_dim)
        assert layer.key_scales is not None and layer.key_scales.shape == (
            2,
            16,
            num_kv_heads,
            head_dim // 32,
        )


def test_int4_needs_pairs_of_values():
    with pytest.raises(ValueError, match=r"^kv_dtype: int4 packs two values of a head into a byte.* has 5$"):
        KVStorage.of("int4", torch.float32, {5})
