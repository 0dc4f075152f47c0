"""Random steps over paged keys and values, and the plain float64 attention they are compared with."""

from dataclasses import dataclass, fields, replace

import torch

from kernels.attention_batch import AttentionBatch, AttentionOptions
from kernels.kv_layer import KVLayer


@dataclass
class Case:
    """One step: tensors as `paged_attention` takes them."""

    q: torch.Tensor
    kv: KVLayer
    batch: AttentionBatch
    options: AttentionOptions

    def to(self, device: torch.device) -> "Case":
        b = self.batch
        batch = AttentionBatch(
            *(t.to(device) for t in (b.page_table, b.query_start, b.context_lens, b.slot_mapping)),
            b.num_decode_rows,
            b.query_lens,
            b.context_lens_host,
        )
        kv = replace(self.kv, **{f.name: getattr(self.kv, f.name).to(device) for f in fields(self.kv)[:2]})
        options = self.options
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.to(device))
        return Case(self.q.to(device), kv, batch, options)


def make_case(
    rows: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> Case:
    """Make a step of rows (query_len, context_len) on scattered pages; unused cache memory holds NaN."""
    pages_of = [-(-length // page_size) for _, length in rows]
    num_pages = sum(pages_of) + 3
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    kv = KVLayer(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    free = torch.randperm(num_pages).tolist()
    page_table = torch.full((len(rows), max(pages_of) + 1), num_pages - 1, dtype=torch.int32)
    slots: list[int] = []
    for i, (query_len, length) in enumerate(rows):
        pages = [free.pop() for _ in range(pages_of[i])]
        page_table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        row_slots = [pages[p // page_size] * page_size + p % page_size for p in range(length)]
        for cache in kv.tensors:
            cache.view(-1, num_kv_heads, head_dim)[row_slots] = torch.randn(
                length, num_kv_heads, head_dim
            ).to(dtype)
        slots += row_slots[length - query_len :]
    query_lens, context_lens = [n for n, _ in rows], [length for _, length in rows]
    num_tokens = sum(query_lens)
    # q is a view of a fused projection, as in a model.
    fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    q = fused[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
    query_start = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = AttentionBatch(
        page_table=page_table,
        query_start=query_start,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_decode_rows=next((i for i, n in enumerate(query_lens) if n != 1), len(rows)),
        query_lens=query_lens,
        context_lens_host=context_lens,
    )
    return Case(q, kv, batch, AttentionOptions(head_dim**-0.5))


def make_alone(case: Case, row: int, num_queries: int, length: int, start: int) -> Case:
    """Return a step with one row of another, whose first query is number `start` of all."""
    batch = AttentionBatch(
        page_table=case.batch.page_table[row : row + 1],
        query_start=torch.tensor([0, num_queries], dtype=torch.int32, device=case.q.device),
        context_lens=case.batch.context_lens[row : row + 1],
        slot_mapping=case.batch.slot_mapping[start : start + num_queries],
        num_decode_rows=int(num_queries == 1),
        query_lens=[num_queries],
        context_lens_host=[length],
    )
    return Case(case.q[start : start + num_queries], case.kv, batch, case.options)


def exact_attention(case: Case, options: AttentionOptions) -> torch.Tensor:
    """Row by row, key by key, in float64."""
    scale, window, softcap, sinks = options
    page_size, num_kv_heads = case.kv.keys.shape[1:3]
    num_heads, head_dim = case.q.shape[1:]
    out = torch.empty(case.q.shape, dtype=torch.float64)
    start = 0
    query_lens, context_lens = case.batch.host_lens()
    for row, (n, length) in enumerate(zip(query_lens, context_lens, strict=True)):
        pages = case.batch.page_table[row, : -(-length // page_size)].long()
        k, v = (
            cache[pages].reshape(-1, num_kv_heads, head_dim)[:length].double()
            for cache in case.kv.tensors[:2]
        )
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (k, v))
        distance = torch.arange(length) - torch.arange(length - n, length).unsqueeze(1)
        scores = torch.einsum("qhd,khd->hqk", case.q[start : start + n].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = (distance > 0) | (distance <= -window) if window else distance > 0
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, n, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[start : start + n] = torch.einsum("hqk,khd->qhd", weights, v)
        start += n
    return out
