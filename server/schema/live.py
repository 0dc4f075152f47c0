"""GET /live_stats: the events about the engine that the page at / shows."""

from pydantic import Field

from engine.stats import Phase
from server.schema.wire import WireResponse


class LiveTimes(WireResponse):
    """Times that were measured since the event before."""

    mean_seconds: float
    largest_seconds: float


class LiveSequence(WireResponse):
    """A sequence that runs or waits."""

    id: str = Field(description="begins with the id of its answer")
    phase: Phase
    prompt_tokens: int
    cached_tokens: int = Field(description="of the prompt, found in the prefix cache")
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    pages: int
    age_seconds: float


class LivePages(WireResponse):
    """The page pool."""

    page_size: int = Field(description="tokens in a page")
    used: int = Field(description="held by sequences, shared ones included")
    shared: int = Field(description="held by several sequences")
    cached: int = Field(description="kept for reuse alone")
    free: int
    predicted: int = Field(description="expected peak of used pages, if nothing else starts")
    pages_per_cell: int
    cells: str = Field(
        description="three hexadecimal digits for each cell of consecutive pages: the fifteenths, "
        "rounded up, that one sequence uses, that several share, and that are cached"
    )


class LiveTotals(WireResponse):
    """Counts since the start."""

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    evicted_pages: int
    drafts: int
    accepted_drafts: int


class LiveStats(WireResponse):
    """One event: the engine now, and what it did since the event before."""

    model: str
    interval_seconds: float
    running: int
    waiting: int
    draining: bool
    output_tokens_per_second: float
    prompt_tokens_per_second: float = Field(description="those found in the prefix cache included")
    ttft: LiveTimes | None = Field(description="null if there was no first token")
    itl: LiveTimes | None = Field(description="time between two tokens of a stream")
    step: LiveTimes | None = Field(description="time of a step on the device")
    loop_lag: LiveTimes | None = Field(description="lateness of a 10 ms timer, while there is work")
    tokens_per_step: float | None
    device_idle_share: float = Field(
        description="share of the interval in which the device was idle while work waited"
    )
    totals: LiveTotals
    pages: LivePages
    sequences: list[LiveSequence] = Field(description="the first ones: running before waiting")
