import pytest
import torch

from kernels.kv_layer import KVLayer
from kernels.rope_kv_write import QKNorm, rope_kv_write
from tests.kernels.conftest import Target
from tests.kernels.test_norms import exact_rms_norm
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def angles(max_position, rotary_dim):
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    phase = torch.arange(max_position).double().unsqueeze(1) * frequencies
    return torch.stack((phase.cos(), phase.sin()), 1).float()


def exact_rotation(x, table, positions, interleaved):
    """The paper's complex form: (a + ib) * (cos + i sin)."""
    half = table.shape[2]
    turn = torch.complex(table[positions, 0].double(), table[positions, 1].double()).unsqueeze(1)
    rotated = x[..., : 2 * half].double()
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pairs = torch.complex(first, second) * turn
    turned = torch.stack((pairs.real, pairs.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, x[..., 2 * half :].double()), -1)


def exact_layer_norm(x, weight, eps):
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check(
    target, dtype, heads, head_dim, rotary_dim, num_tokens, page_size,
    *, fused=True, normed="", weight_dtype=None, interleaved=False, scaled=False,
):  # fmt: skip
    num_heads, num_kv_heads = heads
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    if fused:
        rows = torch.randn(num_tokens, sum(sizes) * head_dim).to(dtype).to(target.device)
        q, k, v = (
            part.view(num_tokens, -1, head_dim) for part in rows.split([n * head_dim for n in sizes], -1)
        )
    else:
        q, k, v = (torch.randn(num_tokens, n, head_dim).to(dtype).to(target.device) for n in sizes)
    before = [t.cpu().clone() for t in (q, k, v)]
    norm = None
    if normed:
        is_layer_norm = normed == "layer"
        shapes = [(n, head_dim) if is_layer_norm else (head_dim,) for n in heads]
        weights = [(1 + 0.2 * torch.randn(shape)).to(weight_dtype or dtype) for shape in shapes]
        norm = QKNorm(*target.to(*weights), 1e-5, is_layer_norm)
        exact = exact_layer_norm if is_layer_norm else exact_rms_norm
        before[:2] = [exact(x, w, 1e-5) for x, w in zip(before, weights, strict=False)]
    table = angles(5000, rotary_dim)
    positions = torch.randint(0, 5000, (num_tokens,))
    num_pages = num_tokens // page_size + 2
    slots = torch.randperm(num_pages * page_size)[:num_tokens]
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    kv = KVLayer(*(torch.full(shape, 7.0, dtype=dtype, device=target.device) for _ in range(2)))
    turns = table[positions].to(target.device) if rotary_dim else None
    q_scale = 1 + torch.rand(num_tokens) if scaled else None
    on_device = None if q_scale is None else q_scale.to(target.device)
    rope_kv_write(q, k, v, turns, kv, slots.to(target.device), norm, interleaved, on_device)

    exact_q = exact_rotation(before[0], table, positions, interleaved)
    assert_close(q, exact_q if q_scale is None else exact_q * q_scale[:, None, None], dtype)
    exact_k = exact_rotation(before[1], table, positions, interleaved)
    k_rows, v_rows = (cache.cpu().view(-1, num_kv_heads, head_dim) for cache in kv.tensors)
    assert_close(k_rows[slots], exact_k, dtype)
    assert torch.equal(v_rows[slots], before[2])
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool)
    untouched[slots] = False
    assert (k_rows[untouched] == 7).all(), "only the given slots of k are written"
    assert (v_rows[untouched] == 7).all(), "only the given slots of v are written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_dtypes_and_layouts(target: Target, dtype: torch.dtype, fused: bool):
    check(target, dtype, (9, 3), 64, 64, 5, 16, fused=fused)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 80), (80, 32), (96, 96), (128, 64), (256, 256)])
def test_head_dims_and_partial_rotation(target: Target, head_dim: int, rotary_dim: int):
    check(target, torch.float32, (4, 2), head_dim, rotary_dim, 3, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (20, 20), (80, 32), (64, 0)])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_heads_are_normalised_first(
    target: Target, dtype, head_dim: int, rotary_dim: int, fused: bool, norm: str
):
    check(target, dtype, (9, 3), head_dim, rotary_dim, 5, 16, fused=fused, normed=norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_weight_in_float32_multiplies_before_the_only_rounding(target: Target, dtype):
    check(target, dtype, (9, 3), 64, 64, 5, 16, normed="rms", weight_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (20, 20), (80, 32), (24, 10)])
@pytest.mark.parametrize("normed", ["", "rms", "layer"])
@pytest.mark.parametrize("fused", [True, False])
def test_interleaved_pairs(target: Target, dtype, head_dim: int, rotary_dim: int, normed: str, fused: bool):
    check(target, dtype, (5, 1), head_dim, rotary_dim, 3, 16, fused=fused, normed=normed, interleaved=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", ["", "rms"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_are_scaled_after_the_rotation(target: Target, dtype, normed: str, interleaved: bool):
    check(target, dtype, (9, 3), 20, 20, 5, 16, normed=normed, interleaved=interleaved, scaled=True)


@pytest.mark.parametrize("head_dim", [64, 20])
def test_without_rotation(target: Target, head_dim: int):
    check(target, torch.bfloat16, (9, 3), head_dim, 0, 5, 16)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_page_sizes(target: Target, page_size: int):
    check(target, torch.float32, (7, 1), 64, 64, 2 * page_size + 1, page_size)


def test_one_token(target: Target):
    q = torch.randn(1, 2, 64, device=target.device)
    cache = torch.zeros(2, 16, 1, 64, device=target.device)
    k, v = torch.randn(2, 1, 1, 64, device=target.device)
    slot = torch.tensor([17], device=target.device)
    before = q.clone()
    rope_kv_write(q, k, v, angles(1, 64).to(target.device), KVLayer(cache, torch.zeros_like(cache)), slot)
    assert torch.equal(q, before), "position 0 is not turned"
    assert cache[1, 1, 0].any()
    assert not cache[0].any()


def test_prefill_sizes(target: Target):
    if not target.large:
        pytest.skip("8192 tokens are for a GPU")
    check(target, torch.bfloat16, (32, 8), 128, 128, 8192, 16)
    check(target, torch.bfloat16, (32, 8), 128, 128, 8192, 16, normed="rms")
