"""Samples of one prompt: the first computes it, the others start on its pages.

The leader of a group waits and runs like any sequence. Its followers wait beside the queue until all of its
prompt is scheduled; then each shares the full pages, gets a copy of the last one if that is not full, and
computes the last prompt token again, for logits of its own. A follower whose leader is gone, or has lost its
pages, is a sequence like any other.

    leader    │ prompt: steps 1 to 4 │ step 5   step 6
    follower  │        (waits)       │ step 5   step 6     relies on steps 1 to 4 until step 5 has landed
"""

from collections.abc import Iterable

from engine.schedule.sequence import Sequence


class Groups:
    """Who follows whom, and who relies on steps that may still fail."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # of each leader: the one that computes the last of what it knows
        self._ready: list[Sequence] = []
        self._leaders: dict[int, Sequence] = {}
        self._reliances: dict[int, int] = {}

    def add(self, leader: Sequence) -> None:
        """A sequence has followers, which are parked."""
        self._steps[leader.id] = -1

    def scheduled(self, sequence: Sequence, step: int) -> None:
        """Step `step` computes the last of a sequence's known tokens, if all goes well."""
        if sequence.id in self._steps:
            self._steps[sequence.id] = step
            self._ready.append(sequence)

    def take_ready(self) -> list[Sequence]:
        """Leaders whose tokens have been scheduled since the last call."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return ready

    def follow(self, leader: Sequence, followers: list[Sequence]) -> None:
        """These may start on the pages of `leader`, as long as it has them."""
        if not leader.is_finished:
            self._leaders.update((follower.id, leader) for follower in followers)

    def leader_of(self, follower: Sequence, step: int) -> Sequence | None:
        """Whose pages hold all of a waiting sequence's prompt once `step` begins."""
        leader = self._leaders.get(follower.id)
        if leader is None or leader.slot < 0 or leader.num_scheduled_tokens < leader.num_history_tokens:
            return None
        return leader if self._steps[leader.id] < step else None

    def start(self, sequence: Sequence, leader: Sequence | None) -> bool:
        """A sequence starts, maybe on its leader's pages; returns whether a step has yet to compute them."""
        self._leaders.pop(sequence.id, None)
        if leader is None or leader.num_computed_tokens >= sequence.num_prompt_tokens - 1:
            return False
        self._reliances[sequence.id] = leader.id
        return True

    def land(self, sequence: Sequence) -> None:
        """A step of a sequence has gone well, and so have those of its leader before it."""
        self._reliances.pop(sequence.id, None)

    def relying_on(self, sequence_ids: Iterable[int]) -> list[int]:
        """Ids of the sequences that started on what a step with these ids was to compute."""
        leaders = set(sequence_ids) if self._reliances else ()
        return [follower for follower, leader in self._reliances.items() if leader in leaders]

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._steps.pop(sequence.id, None)
        self._leaders.pop(sequence.id, None)
        self._reliances.pop(sequence.id, None)
