"""The KV cache of one layer: what attention reads and `rope_kv_write` fills."""

from typing import NamedTuple

import torch


class KVLayer(NamedTuple):
    """Keys and values of one layer, each [num_pages, page_size, num_kv_heads, head_dim], contiguous."""

    keys: torch.Tensor
    values: torch.Tensor
