"""Routing, grouping, grouped products and sums of experts, against plain loops over tokens.

Covers kernels/router.py, kernels/expert_routing.py, kernels/grouped_linear.py, kernels/expert_sum.py and
kernels/grouped_linear_sum.py.
"""

import pytest
import torch

from kernels.expert_routing import (
    ExpertGroups,
    RouterOptions,
    group_by_expert,
    max_tiles,
    route_tokens,
    tile_rows,
)
from kernels.expert_sum import expert_sum
from kernels.grouped_linear import GatedActivation, grouped_linear
from kernels.grouped_linear_sum import grouped_linear_sum
from kernels.router import route
from tests.kernels.tolerances import assert_close

OPTIONS = [
    RouterOptions(2),
    RouterOptions(4, normalize=True),
    RouterOptions(3, "sigmoid", normalize=True, scale=2.5),
    RouterOptions(4, "sigmoid", num_groups=3, top_groups=2),
    RouterOptions(1, "sigmoid", normalize=True),
]


def route_one(logits, options, bias):
    """Choose the experts of one token with lists."""
    scores = (logits.sigmoid() if options.score == "sigmoid" else logits.softmax(0)).tolist()
    ranked = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // options.num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(options.num_groups)]
    if options.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:2]))
    allowed = [expert for group in groups[: options.top_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: options.top_k]
    total = sum(scores[expert] for expert in chosen) if options.normalize else 1.0
    return chosen, [scores[expert] / total * options.scale for expert in chosen]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_experts", [6, 129])
def test_routes_each_token(target, options, has_bias, num_experts):
    logits = torch.randn(5, num_experts)
    bias = torch.randn(num_experts) * 0.3 if has_bias else None
    ids, weights = route_tokens(*target.to(logits), options, None if bias is None else bias.to(target.device))
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    for token in range(5):
        extra = [0.0] * num_experts if bias is None else bias.tolist()
        chosen, expected = route_one(logits[token], options, extra)
        assert ids[token].tolist() == chosen
        torch.testing.assert_close(weights[token].cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_equal_logits_choose_the_first_experts(target):
    ids, weights = route_tokens(*target.to(torch.zeros(2, 7)), RouterOptions(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[pytest.approx(1 / 7)] * 3] * 2


def test_logits_that_are_not_numbers_choose_experts_that_exist(target):
    logits = torch.full((1, 5), torch.nan)
    ids, _ = route_tokens(*target.to(logits), RouterOptions(4, "sigmoid"))
    assert len(set(ids[0].tolist())) == 4
    assert ids.min() >= 0 and ids.max() < 5


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(9, 2, 3), (40, 3, 7), (17, 8, 130), (1100, 4, 5)]
)
def test_groups_hold_each_pair_once_in_the_order_of_tokens(target, num_tokens, top_k, num_experts):
    if num_tokens > 100 and target.backend == "triton" and not target.large:
        num_tokens = 100
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    ids[ids == 1] = 0  # one without any pair
    groups = group_by_expert(*target.to(ids), num_experts)
    order, flat = groups.order.tolist(), ids.flatten().tolist()
    assert order == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    covered = []
    for expert, first, count in groups.tiles.T.tolist():
        assert count <= groups.tile_rows
        assert {flat[pair] for pair in order[first : first + count]} <= {expert}
        covered += range(first, first + count)
    assert covered == list(range(len(flat)))
    used = (groups.tiles[2] > 0).tolist()
    assert used == sorted(used, reverse=True), "unused tiles come last"


@pytest.mark.parametrize("num_experts", [1, 7, 128])
@pytest.mark.parametrize("num_pairs", [1, 100, 4097])
def test_there_are_tiles_for_the_worst_routing(num_experts, num_pairs):
    """One pair to all experts but the last, the rest to that one, and everything to one expert."""
    rows = tile_rows(num_pairs, num_experts)
    hit = min(num_experts, num_pairs)
    uneven = hit - 1 + -(-(num_pairs - hit + 1) // rows)
    assert max_tiles(num_pairs, num_experts, rows) >= max(uneven, -(-num_pairs // rows))


ACTIVATIONS = [
    None,
    GatedActivation("silu"),
    GatedActivation("gelu"),
    GatedActivation("gelu_tanh"),
    GatedActivation("swiglu_clamped", 1.7, 0.5),
]


def activated(gate_up, activation):
    if activation is None:
        return gate_up
    gate, up = gate_up.chunk(2)
    if activation.kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation.kind.startswith("gelu"):
        approximate = "tanh" if activation.kind == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(gate, approximate=approximate) * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(gate * activation.alpha) * (up + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a and a.kind)
@pytest.mark.parametrize(("num_tokens", "top_k", "has_bias"), [(1, 3, True), (11, 3, False), (37, 2, True)])
def test_each_pair_meets_the_weight_of_its_expert(target, dtype, activation, num_tokens, top_k, has_bias):
    if dtype == torch.bfloat16 and target.backend == "triton" and not target.large:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    num_experts, features, size = 5, 26, 50
    x = torch.randn(num_tokens, size).to(dtype)
    weight = (torch.randn(num_experts, features, size) * size**-0.5).to(dtype)
    bias = torch.randn(num_experts, features).to(dtype) if has_bias else None
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    groups = group_by_expert(*target.to(ids), num_experts)
    expected = []
    for token, experts in enumerate(ids.tolist()):
        for expert in experts:
            y = weight[expert].double() @ x[token].double()
            expected.append(activated(y if bias is None else y + bias[expert].double(), activation))
    moved = None if bias is None else bias.to(target.device)
    found = grouped_linear(*target.to(x, weight), groups, bias=moved, activation=activation)
    assert_close(found, torch.stack(expected), dtype)
    # A row for each pair, as the second product of an expert has.
    down = (torch.randn(num_experts, 9, found.shape[1]) * found.shape[1] ** -0.5).to(dtype)
    again = grouped_linear(found, *target.to(down), groups)
    rows = [down[e].double() @ y.double() for e, y in zip(ids.flatten().tolist(), found.cpu(), strict=True)]
    assert_close(again, torch.stack(rows), dtype)


def narrow_weight(*shape, kind):
    """Random values of eight bits."""
    if kind == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    return (torch.randn(shape) * 60).to(torch.float8_e4m3fn)


@pytest.fixture(params=["int8", "fp8", "bits of fp8"])
def kind(request, monkeypatch):
    """Kind of a weight of eight bits; the last is that of a GPU without fp8."""
    if request.param == "bits of fp8":
        monkeypatch.setattr("kernels.fp8_values.has_fp8", lambda _device: False)
    return request.param


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_weights_of_eight_bits_are_scaled(target, kind, num_tokens):
    x = torch.randn(num_tokens, 33)
    weight = narrow_weight(3, 8, 33, kind=kind)
    scale = torch.rand(3, 8) * 0.01
    ids = torch.randint(0, 3, (num_tokens, 1)).int()
    groups = group_by_expert(*target.to(ids), 3)
    found = grouped_linear(*target.to(x, weight), groups, scale=scale.to(target.device))
    rows = [
        (weight[e].double() * scale[e, :, None]) @ y.double() for e, y in zip(ids.flatten(), x, strict=True)
    ]
    assert_close(found, torch.stack(rows), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [None, GatedActivation("silu")], ids=lambda a: a and a.kind)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_weights_of_fp8_have_scales_of_blocks(target, kind, dtype, activation, num_tokens):
    num_experts, features, size, rows = 3, 24, 300, 6
    x = torch.randn(num_tokens, size).to(dtype)
    weight = narrow_weight(num_experts, features, size, kind="fp8")
    scale = torch.rand(num_experts, features // rows, -(-size // 128)) * 1e-3
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)]).int()
    groups = group_by_expert(*target.to(ids), num_experts)
    found = grouped_linear(
        *target.to(x, weight), groups, scale=scale.to(target.device), activation=activation
    )
    of_values = scale.double().repeat_interleave(rows, 1).repeat_interleave(128, 2)[..., :size]
    exact = weight.double() * of_values
    expected = [
        activated(exact[expert] @ x[token].double(), activation)
        for token, experts in enumerate(ids.tolist())
        for expert in experts
    ]
    assert_close(found, torch.stack(expected), dtype, size)


def test_a_pair_alone_and_among_others_has_one_result(target):
    """The tile of one pair, and a tile of an expert's pairs, add in the same order."""
    x, weight = torch.randn(30, 64).half(), torch.randn(2, 32, 64).half() / 8
    x, weight = target.to(x, weight)
    ids = torch.zeros(30, 1, dtype=torch.int32, device=target.device)
    together = grouped_linear(x, weight, group_by_expert(ids, 2))
    alone = grouped_linear(x[7:8], weight, ExpertGroups(ids[7:8]))
    assert_close(alone, together[7:8].double(), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_results_are_weighted_and_summed(target, dtype, shared):
    results, weights = torch.randn(15, 37).to(dtype), torch.rand(5, 3)
    expected = (results.double().view(5, 3, 37) * weights[..., None].double()).sum(1)
    extra = []
    if shared != "none":
        extra.append(torch.randn(5, 37).to(dtype))
        added = extra[0].double()
        if shared == "gated":
            extra.append(torch.randn(5, 1).to(dtype))
            added = added * extra[1].double().sigmoid()
        expected = expected + added
    found = expert_sum(*target.to(results, weights, *extra))
    assert found.dtype == dtype
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("num_tokens", [1, 5, 19])
@pytest.mark.parametrize("extra_rows", [0, 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_router(target, num_tokens, extra_rows, has_bias):
    """Twice, since a launch leaves counters for the next one."""
    num_experts, size = 21, 1100
    x, weight = torch.randn(num_tokens, size), torch.randn(num_experts + extra_rows, size) * size**-0.5
    biases = (torch.randn(num_experts + extra_rows), torch.randn(num_experts) * 0.1) if has_bias else ()
    options = RouterOptions(4, "sigmoid" if has_bias else "softmax", normalize=True)
    logits = x.double() @ weight.double().T + (biases[0].double() if has_bias else 0)
    for _ in range(2):
        ids, weights, rest = route(*target.to(x, weight), num_experts, options, *target.to(*biases))
        assert rest.shape == (num_tokens, extra_rows)
        if extra_rows:
            assert_close(rest, logits[:, num_experts:], torch.float32, size)
        for token in range(num_tokens):
            extra = biases[1].tolist() if has_bias else [0.0] * num_experts
            chosen, expected = route_one(logits[token, :num_experts], options, extra)
            assert ids[token].tolist() == chosen
            torch.testing.assert_close(weights[token].cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 6), (3, 72), (12, 6)])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_products_are_weighted_and_summed(target, dtype, num_tokens, num_experts, quantized, shared):
    check_weighted_sum(target, dtype, num_tokens, num_experts, "int8" if quantized else None, shared)


@pytest.mark.parametrize("num_tokens", [1, 12])
def test_products_of_eight_bits_are_weighted_and_summed(target, kind, num_tokens):
    check_weighted_sum(target, torch.float16, num_tokens, 6, kind, shared=False)


def check_weighted_sum(target, dtype, num_tokens, num_experts, kind, shared):
    """With 12 tokens pairs are sorted."""
    if dtype == torch.bfloat16 and target.backend == "triton" and not target.large and num_tokens == 12:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 matrices")
    top_k, size, features = 3, 1030, 21
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    x, weights = torch.randn(num_tokens * top_k, size).to(dtype), torch.rand(num_tokens, top_k)
    bias = torch.randn(num_experts, features).to(dtype)
    if kind:
        weight = narrow_weight(num_experts, features, size, kind=kind)
        scale = torch.rand(num_experts, features) * 1e-3
        exact = weight.double() * scale.double()[..., None]
    else:
        weight, scale = (torch.randn(num_experts, features, size) * size**-0.5).to(dtype), None
        exact = weight.double()
    pairs = [exact[e] @ row.double() + bias[e].double() for e, row in zip(ids.flatten(), x, strict=True)]
    expected = (torch.stack(pairs).unflatten(0, (num_tokens, top_k)) * weights[..., None]).sum(1)
    extra = (torch.randn(num_tokens, features).to(dtype), torch.randn(num_tokens, 1)) if shared else ()
    if shared:
        expected = expected + extra[0].double() * extra[1].double().sigmoid()
    groups = group_by_expert(*target.to(ids), num_experts)
    found = grouped_linear_sum(
        *target.to(x, weight),
        groups,
        *target.to(weights, *extra),
        scale=None if scale is None else scale.to(target.device),
        bias=bias.to(target.device),
    )
    assert_close(found, expected, dtype, size)


def test_pairs_that_hardly_share_experts_are_not_sorted(target):
    if target.backend == "torch":
        pytest.skip("the twin always sorts")
    for num_tokens, num_experts, is_sorted in ((1, 4, False), (2, 64, False), (2, 63, True), (5, 4096, True)):
        ids = torch.arange(num_tokens * 4, dtype=torch.int32, device=target.device).view(-1, 4) % num_experts
        assert (group_by_expert(ids, num_experts).order is not None) == is_sorted


def test_no_tokens(target):
    empty = torch.zeros(0, 4, device=target.device)
    ids, weights = route_tokens(empty, RouterOptions(2))
    groups = group_by_expert(ids, 4)
    found = grouped_linear(torch.zeros(0, 3, device=target.device), torch.zeros(4, 6, 3), groups)
    assert expert_sum(found, weights).shape == (0, 6)
