"""The protocol of step listeners: a recorder, for example, sees every request and step of the engine."""

from collections import abc
from typing import Protocol

from engine.config import EngineConfig
from engine.kv_layout import PageArray
from engine.model_info import ModelInfo
from engine.outputs import FinishReason, StepOutput, StepPlan
from engine.schedule.sequence import Sequence


class StepListener(Protocol):
    """Gets the engine's events, on the event loop. Its methods must be quick and must not raise.

    Here they do nothing: a subclass overrides those it needs. Times are seconds of time.perf_counter().
    """

    def started(self, model: ModelInfo, config: EngineConfig, token_budget: int, fingerprint: str) -> None:
        """The model is loaded; `fingerprint` identifies its weights."""

    def discard(self) -> None:
        """The engine could not start: undo what opening the listener did."""

    def arrived(self, sequences: abc.Sequence[Sequence], now: float) -> None:
        """Requests with one prompt were queued."""

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step goes to the device."""

    def completed(self, output: StepOutput) -> None:
        """A step has returned its tokens."""

    def failed(self, plan: StepPlan, now: float) -> None:
        """A step has raised an exception."""

    def pages_cached(
        self, namespace: abc.Hashable, tokens: bytes, pages: PageArray, parent: int | None
    ) -> None:
        """Pages [num_columns] of one KV group entered the prefix cache, with their tokens as int32.

        They follow the cached page `parent`, or begin a prompt. Only requests of `namespace` find them.
        """

    def pages_evicted(self, pages: PageArray) -> None:
        """Pages [num_columns] of that group left the prefix cache."""

    def ended(self, sequence_id: int, reason: FinishReason, now: float) -> None:
        """A request has ended, for whatever reason."""

    def close(self) -> None:
        """The engine has stopped. Runs in a thread, so it may block."""
