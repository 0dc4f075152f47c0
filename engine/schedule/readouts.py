"""Tracks which tokens of a prompt its readouts have been computed for."""

from engine.outputs import RowReadout
from engine.schedule.sequence import Sequence

_Ends = dict[int, int]  # by index in Request.readouts: position after the last token whose part has come back


class ReadoutProgress:
    """Finds the tokens of a prompt that must be computed for its readouts, and those that a row reads."""

    def __init__(self) -> None:
        self._ends: dict[int, _Ends] = {}  # by sequence id, only of readouts that come in parts

    def first_unread(self, sequence: Sequence) -> int:
        """Return the position of the first token that must be computed for a readout, or `num_tokens`.

        Earlier tokens may come from the prefix cache.
        """
        readouts = sequence.request.readouts
        if not readouts:
            return sequence.num_tokens
        positions = [self._unread(sequence, index) for index in range(len(readouts))]
        return min((unread.start for unread in positions if unread), default=sequence.num_tokens)

    def row_readouts(self, sequence: Sequence, start: int, end: int) -> tuple[RowReadout, ...]:
        """Return the parts of readouts that a row of the tokens from `start` to `end` - 1 computes."""
        prompt = sequence.request.prompt_token_ids
        parts = []
        for index, readout in enumerate(sequence.request.readouts):
            unread = self._unread(sequence, index)
            first, last = max(start, unread.start), min(end, unread.stop)
            if first < last:
                follow = prompt[first + 1 : last + 1]
                parts.append(RowReadout(readout, first, last - first, follow, last == unread.stop))
        return tuple(parts)

    def on_row_done(self, sequence: Sequence, readouts: tuple[RowReadout, ...]) -> None:
        """Record that a row has returned these parts: they are not read again when the sequence resumes."""
        for part in readouts:
            if part.readout.comes_in_parts:
                index = sequence.request.readouts.index(part.readout)
                self._ends.setdefault(sequence.id, {})[index] = part.start + part.num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Remove the entry of a sequence that has ended."""
        self._ends.pop(sequence.id, None)

    def _unread(self, sequence: Sequence, index: int) -> range:
        positions = sequence.request.readouts[index].positions(sequence.num_prompt_tokens)
        end = self._ends.get(sequence.id, {}).get(index, 0)
        return range(max(positions.start, end), positions.stop)
