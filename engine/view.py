"""Views of sequences and pages for those who watch the engine: cheap snapshots of a few of them."""

from engine.schedule.pages import PagePool
from engine.schedule.sequence import Sequence, SequenceStatus
from engine.stats import PageCells, Phase, SequenceView


def phase_of(sequence: Sequence) -> Phase:
    """Return what a sequence that has not ended does."""
    if sequence.status is SequenceStatus.WAITING:
        return Phase.PREEMPTED if sequence.has_started else Phase.WAITING
    # Behind drafts one token of the history is left: it is computed with the next ones.
    if sequence.is_verifying or sequence.num_computed_tokens >= sequence.num_history_tokens - 1:
        return Phase.DECODE
    return Phase.RECOMPUTE if sequence.num_preemptions else Phase.PREFILL


def view_of(sequence: Sequence, now: float) -> SequenceView:
    """Return a sequence as it is `now`, a time of the clock of its arrival."""
    return SequenceView(
        id=sequence.request.request_id,
        phase=phase_of(sequence),
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        computed_tokens=sequence.num_computed_tokens,
        output_tokens=sequence.num_output_tokens,
        max_tokens=sequence.request.sampling.max_tokens,
        pages=sum(map(len, sequence.pages)),
        age_seconds=now - sequence.arrival_seconds,
    )


def cells_of(pool: PagePool, max_cells: int) -> PageCells:
    """Return the pages of a pool in up to `max_cells` cells."""
    per_cell, counts = pool.cells(max_cells)
    used, shared, cached = counts.T.tolist()
    return PageCells(per_cell, used, shared, cached)
