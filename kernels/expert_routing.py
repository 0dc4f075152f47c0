"""Which experts a token goes to, and the tokens of a step sorted by expert.

    route_tokens(logits [num_tokens, num_experts], ...) -> expert_ids, weights [num_tokens, top_k]
    group_by_expert(expert_ids, num_experts) -> ExpertGroups

A pair is a token and one of its experts: pair `token * top_k + choice`. Grouping sorts the pairs by expert,
in the order of tokens, and cuts each expert's into tiles, so that a product over them has a grid that depends
on the sizes alone. Nothing here waits for the device.
"""

from typing import Any, Literal, NamedTuple

import torch

from kernels.dispatch import dispatch, tl, triton

# Without sorting, each pair is a tile of its own and reads its expert's weights. The pairs of one token never
# share an expert; with an eighth of a pair for each expert one in 16 does, which costs less than the sort.
_UNSORTED_PAIRS_PER_EXPERT = 1 / 8
_UNSORTED_PAIRS = 16
_LARGEST_TILE = 128
_SORT_BLOCK = 8192  # 65,536 pairs take 67 µs on an H200; 74 with 4096, 86 with 2048


class RouterOptions(NamedTuple):
    """How a router chooses `top_k` experts of a token by their logits, and weighs their results.

    score: of all experts, a softmax or a sigmoid of their logits. The chosen scores are the weights, divided
    by their sum with `normalize`, then multiplied by `scale`. A softmax of the chosen logits alone is the
    normalized softmax. With num_groups above 1 experts are chosen from the `top_groups` groups of neighbours
    whose two best experts score highest together (DeepSeek-AI, 2024, DeepSeek-V3).
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class ExpertGroups(NamedTuple):
    """The pairs of a step by expert.

    order: int32 [num_pairs], the pairs sorted by expert. tiles: int32 [3, max_tiles]: the expert, the first
    place in `order` and the number of pairs of each tile; unused tiles, the last ones, have 0 pairs.
    tile_rows: the most pairs of a tile. Without `order` each pair is a tile.
    """

    expert_ids: torch.Tensor
    order: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    tile_rows: int = 1

    @property
    def max_tiles(self) -> int:
        """Number of tiles, with those that may be unused."""
        return self.expert_ids.numel() if self.tiles is None else self.tiles.shape[1]

    def pointers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `pairs_of_tile` reads: expert_ids, order and tiles; a kernel ignores those missing."""
        ids = self.expert_ids
        return ids, ids if self.order is None else self.order, ids if self.tiles is None else self.tiles


@triton.jit
def pairs_of_tile(
    ids_ptr, order_ptr, tiles_ptr, max_tiles, tile, SORTED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a tile's expert int64, its pairs and which of them are there [BLOCK_M], and their number."""
    place = tl.arange(0, BLOCK_M)
    if SORTED:
        expert = tl.load(tiles_ptr + tile).to(tl.int64)
        first = tl.load(tiles_ptr + max_tiles + tile)
        count = tl.load(tiles_ptr + 2 * max_tiles + tile)
        there = place < count
        pair = tl.load(order_ptr + first + place, mask=there, other=0)
    else:
        expert = tl.load(ids_ptr + tile).to(tl.int64)
        count = tl.full([], 1, tl.int32)
        there = place < 1
        pair = tl.where(there, tile, 0)
    return expert, pair, there, count


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the pairs of a tile that holds those of most experts, if routing is even."""
    return min(_LARGEST_TILE, max(16, triton.next_power_of_2(3 * num_pairs // (2 * num_experts))))


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the most tiles of `rows` pairs that pairs can need."""
    num_hit = min(num_pairs, num_experts)
    return num_hit + (num_pairs - num_hit) // rows


@triton.jit
def _take_best(x, available, lane, END: tl.constexpr):
    """Return (lane, value) of the largest available x, of the lowest lane among equals."""
    best = tl.max(tl.where(available, x, float("-inf")), 0)
    return tl.min(tl.where(available & (x == best), lane, END - 1), 0), best


@triton.jit
def choose_experts(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    token,
    stride,
    num_experts,
    scale,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the experts of one token and their weights; the logits of all experts are in registers."""
    lane = tl.arange(0, BLOCK)
    available = lane < num_experts
    logits = tl.load(logits_ptr + token * stride + lane, mask=available, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))  # NaN would leave no best one
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        largest = tl.max(logits, 0)
        scores = tl.exp(logits - largest)
        total = tl.sum(scores, 0)
        scores = scores / total
    ranked = scores if SIGMOID or HAS_BIAS else logits
    if HAS_BIAS:
        ranked += tl.load(bias_ptr + lane, mask=available, other=0.0)
    if NUM_GROUPS > 1:
        group = lane * NUM_GROUPS // num_experts
        totals = tl.full([BLOCK], float("-inf"), tl.float32)
        for index in tl.static_range(NUM_GROUPS):
            members = available & (group == index)
            first, best = _take_best(ranked, members, lane, BLOCK)
            _, second = _take_best(ranked, members & (lane != first), lane, BLOCK)
            totals = tl.where(members, best + second, totals)
        open_groups = lane < 0
        for _ in tl.static_range(TOP_GROUPS):
            first, _best = _take_best(totals, available & (open_groups == 0), lane, BLOCK)
            open_groups = open_groups | (group == first * NUM_GROUPS // num_experts)
        available = available & open_groups
    choice = tl.arange(0, CHOICES)
    ids = choice
    weights = tl.zeros([CHOICES], tl.float32)
    for index in tl.static_range(TOP_K):
        best_lane, best = _take_best(ranked, available, lane, BLOCK)
        available = available & (lane != best_lane)
        ids = tl.where(choice == index, best_lane, ids)
        if HAS_BIAS:
            best = tl.sum(tl.where(lane == best_lane, scores, 0.0), 0)
        elif not SIGMOID:
            best = tl.exp(best - largest) / total
        weights = tl.where(choice == index, best, weights)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    there = choice < TOP_K
    tl.store(ids_ptr + token * TOP_K + choice, tl.minimum(ids, num_experts - 1), mask=there)
    tl.store(weights_ptr + token * TOP_K + choice, weights * scale, mask=there)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride,
    num_experts,
    scale,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    choose_experts(
        logits_ptr, bias_ptr, ids_ptr, weights_ptr, token, stride, num_experts, scale,
        TOP_K, SIGMOID, NORMALIZE, HAS_BIAS, NUM_GROUPS, TOP_GROUPS, CHOICES, BLOCK,
    )  # fmt: skip


def route_tokens_triton(
    logits: torch.Tensor, options: RouterOptions, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    ids = torch.empty(num_tokens, options.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, options.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            bias if bias is not None else logits,
            ids,
            weights,
            logits.stride(0),
            num_experts,
            options.scale,
            **choice_constants(options, num_experts, bias is not None),
            num_warps=1,
        )
    return ids, weights


def choice_constants(options: RouterOptions, num_experts: int, has_bias: bool) -> dict[str, Any]:
    """Return the constants of `choose_experts`."""
    return {
        "TOP_K": options.top_k,
        "SIGMOID": options.score == "sigmoid",
        "NORMALIZE": options.normalize,
        "HAS_BIAS": has_bias,
        "NUM_GROUPS": options.num_groups,
        "TOP_GROUPS": options.top_groups,
        "CHOICES": triton.next_power_of_2(options.top_k),
        "BLOCK": triton.next_power_of_2(num_experts),
    }


def route_tokens_torch(
    logits: torch.Tensor, options: RouterOptions, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (expert_ids int32, weights fp32), both [num_tokens, top_k], best expert first.

    logits fp32 [num_tokens, num_experts]; bias fp32 [num_experts] is added to the scores that experts are
    chosen by, and not to the weights (Wang et al., 2024, auxiliary-loss-free load balancing).
    """
    scores = logits.sigmoid() if options.score == "sigmoid" else logits.softmax(-1)
    ranked = scores if options.score == "sigmoid" or bias is not None else logits
    if bias is not None:
        ranked = ranked + bias
    if options.num_groups > 1:
        groups = ranked.unflatten(1, (options.num_groups, -1))
        totals = groups.topk(2, -1).values.sum(-1)
        chosen = torch.zeros_like(totals, dtype=torch.bool)
        chosen.scatter_(1, totals.topk(options.top_groups, -1).indices, True)
        ranked = groups.masked_fill(~chosen[..., None], -torch.inf).flatten(1)
    # A stable sort: among equals the first expert, as the kernel chooses.
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : options.top_k]
    weights = scores.gather(1, ids)
    if options.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * options.scale


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _group_kernel(
    ids_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    max_tiles,
    TILE_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert: it counts all pairs, and writes its own places and tiles."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        there = start + lane < num_pairs
        ids = tl.load(ids_ptr + start + lane, mask=there, other=0)
        counts += tl.histogram(ids, EXPERTS, mask=there).to(tl.int32)
    num_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    before = experts < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    first_tile = tl.sum(tl.where(before, num_tiles, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    own_tiles = tl.sum(tl.where(experts == expert, num_tiles, 0), 0)
    # The last expert's program also marks the tiles that are left as unused.
    end = tl.where(expert == tl.num_programs(0) - 1, max_tiles - first_tile, own_tiles)
    for start in range(0, end, BLOCK):
        tile = start + lane
        there = tile < end
        tl.store(tiles_ptr + first_tile + tile, expert, mask=there)
        tl.store(tiles_ptr + max_tiles + first_tile + tile, first + tile * TILE_ROWS, mask=there)
        rows = tl.maximum(tl.minimum(count - tile * TILE_ROWS, TILE_ROWS), 0)
        tl.store(tiles_ptr + 2 * max_tiles + first_tile + tile, rows, mask=there)
    if count > 0:
        for start in range(0, num_pairs, BLOCK):
            there = start + lane < num_pairs
            mine = ((tl.load(ids_ptr + start + lane, mask=there, other=-1) == expert) & there).to(tl.int32)
            tl.store(order_ptr + first + tl.cumsum(mine, 0) - 1, start + lane, mask=mine > 0)
            first += tl.sum(mine, 0)


def group_by_expert_triton(
    expert_ids: torch.Tensor, num_experts: int, *, rows: int | None = None
) -> ExpertGroups:
    num_pairs = expert_ids.numel()
    assert expert_ids.is_contiguous()
    if rows is None:
        few = min(_UNSORTED_PAIRS, num_experts * _UNSORTED_PAIRS_PER_EXPERT)
        if expert_ids.shape[0] == 1 or num_pairs <= few:
            return ExpertGroups(expert_ids)
        rows = tile_rows(num_pairs, num_experts)
    order = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    num_tiles = max_tiles(num_pairs, num_experts, rows)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=expert_ids.device)
    block = min(_SORT_BLOCK, triton.next_power_of_2(num_pairs))
    _group_kernel[(num_experts,)](
        expert_ids,
        order,
        tiles,
        num_pairs,
        num_tiles,
        TILE_ROWS=rows,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK=block,
        num_warps=8 if block == _SORT_BLOCK else 4,
    )
    return ExpertGroups(expert_ids, order, tiles, rows)


def group_by_expert_torch(expert_ids: torch.Tensor, num_experts: int) -> ExpertGroups:
    """Sort the pairs of expert_ids int32 [num_tokens, top_k] by expert and cut them into tiles.

    The twin makes one tile of all pairs of an expert, for a product each; the kernel cuts tiles of a size.
    """
    flat = expert_ids.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    order = flat.argsort(stable=True).int()
    hit = counts.nonzero().flatten()
    tiles = torch.stack((hit, (counts.cumsum(0) - counts)[hit], counts[hit])).int()
    return ExpertGroups(expert_ids, order, tiles, flat.numel())


route_tokens = dispatch(route_tokens_triton, route_tokens_torch)
group_by_expert = dispatch(group_by_expert_triton, group_by_expert_torch)
