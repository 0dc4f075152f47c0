"""ForwardBatch: everything about a step that the parts of a model may read."""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, row after row: token_ids and positions [num_tokens] int64.

    Every part of the model receives it next to its activations, so data per token that only some parts need
    (an adapter, an expert, an image) becomes a field here and no argument anywhere else.
    `attention` has an entry for each of the model's KV groups. `states` are those of the model's layers that
    have one, [num_slots + 1, *shape] each; a row's part of them is at its slot, `row_slots` int64 [num_rows].
    Rows of padding name the last slot. `is_long` int64 [num_slots + 1] is 1 for slots whose sequence has more
    than `spec.short_context` tokens, else 0; None: none is, or it makes no difference.
    hidden_indices int64 [num_hidden]: tokens whose final hidden states are returned; None: all tokens.
    """

    token_ids: Tensor
    positions: Tensor
    attention: tuple[AttentionBatch, ...]
    states: tuple[Tensor, ...] = ()
    row_slots: Tensor | None = None
    is_long: Tensor | None = None
    hidden_indices: Tensor | None = None

    def only_hidden(self) -> "ForwardBatch":
        """Return the batch of the tokens at `hidden_indices` for the parts after the last attention.

        Its `attention` still describes the rows of the whole step.
        """
        indices = self.hidden_indices
        if indices is None:
            return self
        return dataclasses.replace(
            self, token_ids=self.token_ids[indices], positions=self.positions[indices], hidden_indices=None
        )
