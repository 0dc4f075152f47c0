"""Ops on tokens of a CPU's step: a token has the same result alone and among others, bit for bit.

Covers kernels/cpu/rms_norm.py, kernels/cpu/act_mul.py and kernels/cpu/rope_kv_write.py, of which one thread
computes few tokens and several share many.
"""

from collections.abc import Callable

import pytest
import torch

from kernels.act_mul import gelu_tanh_mul, silu_mul
from kernels.cpu.compiler import is_available
from kernels.kv_layer import KVLayer
from kernels.layer_norm import add_layer_norm, layer_norm
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import QKNorm, rope_kv_write

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba and libgomp")

NUM_TOKENS, HIDDEN, HEAD_DIM, EPS = 150, 2 * 330, 20, 1e-5
NORMS = (None, QKNorm(torch.rand(HEAD_DIM), torch.rand(HEAD_DIM), EPS))


def rotated_and_stored(x: torch.Tensor, norm: QKNorm | None) -> torch.Tensor:
    """Return the q, keys and values of tokens, and the int8 values and scales of both."""
    num_tokens = len(x)
    heads = x[:, : 10 * HEAD_DIM].reshape(num_tokens, 10, HEAD_DIM).clone()
    q, k, v = heads.split((6, 2, 2), 1)
    angles = x[:, -HEAD_DIM:].reshape(num_tokens, 2, HEAD_DIM // 2).contiguous()
    shape = (num_tokens, 1, 2)
    kv = KVLayer(
        *(torch.empty(*shape, HEAD_DIM, dtype=torch.int8) for _ in range(2)),
        *(torch.empty(*shape, 1, dtype=torch.float16) for _ in range(2)),
    )
    rope_kv_write(q, k, v, angles, kv, torch.arange(num_tokens), norm)
    return torch.cat([heads.flatten(1), *(t.flatten(1).float() for t in kv.tensors)], 1)


def added(op: Callable[..., torch.Tensor], x: torch.Tensor, *arguments: object) -> torch.Tensor:
    residual = x.flip(1)
    return torch.cat((op(x.clone(), residual, *arguments), residual), 1)


WEIGHT = torch.rand(HIDDEN)
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, WEIGHT, EPS),
    "layer_norm": lambda x: layer_norm(x, WEIGHT, WEIGHT, EPS),
    "add_rms_norm": lambda x: added(add_rms_norm, x, WEIGHT, EPS, 0.7),
    "two norms": lambda x: added(add_rms_norm, x, WEIGHT, EPS, 0.7, WEIGHT),
    "add_layer_norm": lambda x: added(add_layer_norm, x, WEIGHT, None, EPS),
    "silu_mul": silu_mul,
    "gelu_tanh_mul": gelu_tanh_mul,
    "rope_kv_write": lambda x: rotated_and_stored(x, NORMS[0]),
    "rope_kv_write with norms": lambda x: rotated_and_stored(x, NORMS[1]),
}


@pytest.mark.parametrize("op", OPS)
def test_a_token_alone_and_among_others(op: str):
    x = torch.randn(NUM_TOKENS, HIDDEN)
    together = OPS[op](x)
    alone = torch.cat([OPS[op](x[token : token + 1]) for token in range(NUM_TOKENS)])
    differs = (alone != together).any(1)
    assert not differs.any(), f"{int(differs.sum())} of {NUM_TOKENS} tokens depend on those beside them"
