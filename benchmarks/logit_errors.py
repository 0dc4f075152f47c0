"""How far the logits of a model in some format are from exact ones, for benchmarks.formats."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.device.kv_cache import KVCache
from kernels.paged_attention import AttentionBatch
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from models.loader import empty_decoder, random_tensors
from models.spec import DecoderSpec

PAGE_SIZE = 16


@dataclass
class Comparison:
    """Sums over tokens, of which the figures of a format are made."""

    square_error: float = 0.0
    square: float = 0.0
    num_tokens: int = 0
    num_agreed: int = 0
    surprise: float = 0.0
    num_predicted: int = 0

    def add(self, found: Tensor, exact: Tensor, token_ids: Tensor) -> None:
        """Add the logits [num_tokens, vocab_size] of a sequence, found and exact, and its tokens int64."""
        self.square_error += float((found - exact).square().sum())
        self.square += float(exact.square().sum())
        self.num_tokens += len(token_ids)
        self.num_agreed += int((found.argmax(-1) == exact.argmax(-1)).sum())
        self.surprise += float(torch.nn.functional.cross_entropy(found[:-1], token_ids[1:], reduction="sum"))
        self.num_predicted += len(token_ids) - 1

    @property
    def error_percent(self) -> float:
        """‖found - exact‖ / ‖exact‖ of all logits, in percent."""
        return float(100 * (self.square_error / self.square) ** 0.5)

    @property
    def agreed_percent(self) -> float:
        """The share of tokens after which the most likely one is the exact one."""
        return 100 * self.num_agreed / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of each token but the first of a sequence."""
        return float(torch.tensor(self.surprise / self.num_predicted).exp())


@torch.inference_mode()
def sequence_logits(model: Decoder, kv_dtype: str, token_ids: Tensor, num_rows: int) -> Tensor:
    """Return the logits of a sequence, [num_tokens, vocab_size] fp32, `num_rows` tokens at a time."""
    length, device = len(token_ids), model.device
    num_pages = -(-length // PAGE_SIZE)
    layers = KVCache.of(model, num_pages, PAGE_SIZE, kv_dtype).layers
    page_table = torch.arange(num_pages, dtype=torch.int32, device=device)[None]
    logits = torch.empty(length, model.spec.vocab_size, device=device)
    for start in range(0, length, num_rows):
        end = min(start + num_rows, length)
        positions = torch.arange(start, end, device=device)
        attention = AttentionBatch(
            page_table=page_table,
            query_start=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            context_lens=torch.tensor([end], dtype=torch.int32, device=device),
            slot_mapping=positions,
            num_decode_rows=int(end - start == 1),
            query_lens=[end - start],
            context_lens_host=[end],
        )
        of_groups = (attention,) * len(model.spec.kv_groups)
        hidden = model(ForwardBatch(token_ids[start:end], positions, of_groups), layers)
        logits[start:end] = model.logits(hidden)
    return logits


def random_model(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, quantization: str | None
) -> Decoder:
    """Return a model whose weights are the same random numbers, of bfloat16, in each format and dtype."""
    model = empty_decoder(spec, dtype, device, quantization=quantization)
    parameters = model.parameters()
    for address, tensor in random_tensors(empty_decoder(spec, torch.bfloat16, device)):
        leaf, name, _ = parameters[address]
        leaf.fill(name, tensor.to(dtype))
    model.finish()
    return model
