"""Groups: samples of one prompt, of which the leader computes it and the followers start on its pages.

The leader waits and runs like any sequence. Its followers wait outside the order of the queue until all of
the prompt is scheduled. Then each shares the full pages, gets a copy of the last page if that is not full,
and computes the last prompt token again, for logits of its own. A follower whose leader has ended, or has
lost its pages, starts like any other sequence.

    leader    │ prompt: steps 1 to 4 │ step 5   step 6
    follower  │        (waits)       │ step 5   step 6     depends on steps 1 to 4 until step 5 is committed
"""

from collections.abc import Iterable

from engine.schedule.sequence import Sequence


class Groups:
    """Knows the leader of each follower, and the sequences that depend on steps that may still fail."""

    def __init__(self) -> None:
        # By leader id: the step that computes the last of its history; -1 before it is planned.
        self._last_steps: dict[int, int] = {}
        self._ready: list[Sequence] = []
        self._leaders: dict[int, Sequence] = {}  # by follower id
        self._dependencies: dict[int, int] = {}  # follower id -> leader id

    def add(self, leader: Sequence) -> None:
        """Register the leader of a new group; its followers are parked in the queue."""
        self._last_steps[leader.id] = -1

    def on_history_scheduled(self, sequence: Sequence, step: int) -> None:
        """Record that step `step` computes the last token of a sequence's history."""
        if sequence.id in self._last_steps:
            self._last_steps[sequence.id] = step
            self._ready.append(sequence)

    def pop_ready_leaders(self) -> list[Sequence]:
        """Return the leaders whose history was scheduled since the last call."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return ready

    def add_followers(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Let waiting sequences start on the pages of `leader`, as long as it has them."""
        if not leader.is_finished:
            self._leaders.update((follower.id, leader) for follower in followers)

    def leader_of(self, follower: Sequence, step: int) -> Sequence | None:
        """Return the leader whose pages hold a waiting sequence's whole prompt before step `step`, if any."""
        leader = self._leaders.get(follower.id)
        if leader is None or leader.slot < 0 or leader.num_scheduled_tokens < leader.num_history_tokens:
            return None
        return leader if self._last_steps[leader.id] < step else None

    def on_started(self, sequence: Sequence, leader: Sequence | None) -> bool:
        """Record that a sequence started, on the pages of `leader` if given.

        Returns True if steps in flight have yet to compute them: the sequence depends on these steps.
        """
        self._leaders.pop(sequence.id, None)
        if leader is None or leader.num_computed_tokens >= sequence.num_prompt_tokens - 1:
            return False
        self._dependencies[sequence.id] = leader.id
        return True

    def on_row_done(self, sequence: Sequence) -> None:
        """Record that a row of a sequence was computed, and so were the earlier rows of its leader."""
        self._dependencies.pop(sequence.id, None)

    def dependents_of(self, sequence_ids: Iterable[int]) -> list[int]:
        """Return the ids of sequences that started on pages which rows of `sequence_ids` compute."""
        leaders = set(sequence_ids) if self._dependencies else ()
        return [follower for follower, leader in self._dependencies.items() if leader in leaders]

    def forget(self, sequence: Sequence) -> None:
        """Remove the entries of a sequence that has ended."""
        self._last_steps.pop(sequence.id, None)
        self._leaders.pop(sequence.id, None)
        self._dependencies.pop(sequence.id, None)
