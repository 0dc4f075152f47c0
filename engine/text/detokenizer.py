"""Decodes tokens to text incrementally, for all streams at once.

All text state is kept here and used by one thread only. A step's tokens arrive as one list of jobs; each
stream decodes a short window of its newest tokens, holds back text that may still change (an incomplete UTF-8
sequence, the beginning of a stop string), and returns the rest as a TextDelta.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.control_tokens import mark, strip
from engine.outputs import FinishReason, PromptLogprobColumns, TextDelta, TokenLogprobs
from engine.request import ReasoningSpan
from engine.text.reasoning import ReasoningTracker
from engine.text.token_bytes import MAX_UNFINISHED_BYTES, REPLACEMENT, TokenPieces
from engine.text.token_log import TokenLog

# Prompt tokens decoded in front of an output: some decoders treat the first token of a text differently, such
# as its leading space.
NUM_CONTEXT_TOKENS = 6
# A longer window is cut at its last clean boundary, so that decoding stays cheap.
MAX_WINDOW_TOKENS = 12
# A UTF-8 sequence has at most four bytes, so this many tokens without a complete character are invalid bytes:
# all but the last three, which may still begin a character, are shown as such.
MAX_UNFINISHED_TOKENS = 24
# Most new tokens decoded together.
MAX_ROUND_TOKENS = 16


class BatchDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` used here."""

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of each list of token ids."""


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Begin the text of a sequence. `context_token_ids` are the last tokens of its prompt.

    A stop string that is the text of a control token matches that token, too, shown or not.
    With `return_tokens` its deltas list their tokens, with the log-probabilities that are added with them.
    The text of `healed_token_ids`, with which the output begins, is not shown.
    """

    sequence_id: int
    context_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    skip_special_tokens: bool
    return_tokens: bool = False
    marks: tuple[tuple[int, str], ...] = ()
    reasoning: ReasoningSpan | None = None
    healed_token_ids: tuple[int, ...] = ()


class AddTokens(NamedTuple):
    """Add new tokens of a sequence; with `finish_reason` they are its last.

    `hide_last`: the last token ended the sequence (eos, a stop id), and its text is not shown.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hide_last: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()


class AddPromptTokens(NamedTuple):
    """Add the next tokens of a prompt to the first delta of a sequence that returns its tokens."""

    sequence_id: int
    token_ids: tuple[int, ...]
    scores: PromptLogprobColumns | None


class CloseStream(NamedTuple):
    """Forget a sequence that ended without a last delta (abort, error)."""

    sequence_id: int


Job = OpenStream | AddPromptTokens | AddTokens | CloseStream


class Decoded(NamedTuple):
    """New visible text of one sequence.

    `num_output_tokens` counts its tokens so far, shown or not; `num_reasoning_tokens` those up to the end of
    the reasoning.
    """

    sequence_id: int
    delta: TextDelta
    num_output_tokens: int
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class _Stream:
    """Text state of one sequence.

    The text of `window` is `text`; its first `num_settled` characters have moved to `held`, which keeps text
    that may begin a stop string; stop strings are searched for from `search_from` on. `boundary` is the
    newest place in the window, before its last tokens, where the text was complete: the window may be cut
    there. The next `num_singly` tokens are decoded one by one; the current round decodes `round_size`. The
    next `num_healed` characters are part of the prompt already. `stop_tokens` are the control tokens whose
    text is a stop string, by id.
    """

    stop: tuple[str, ...]
    stop_tokens: dict[int, str]
    include_stop: bool
    min_tokens: int
    skip_special_tokens: bool
    window: list[int]
    text: str = ""
    num_settled: int = 0
    last_settled: str = ""
    boundary: int = 0
    next_boundary: int = 0
    held: str = ""
    matched_stop: str | None = None
    num_output_tokens: int = 0
    num_unreported_tokens: int = 0
    new_token_ids: deque[int] = field(default_factory=deque)
    num_singly: int = 0
    round_size: int = 0
    log: TokenLog | None = None
    tracker: ReasoningTracker | None = None
    search_from: int = 0
    num_reasoning_tokens: int = 0
    num_healed: int = 0


class Detokenizer:
    """Owns the text of all sequences. Not thread-safe: one thread calls it, one step at a time."""

    def __init__(self, decoder: BatchDecoder, pieces: TokenPieces) -> None:
        self._decoder = decoder
        self._pieces = pieces
        self._streams: dict[int, _Stream] = {}

    @property
    def num_streams(self) -> int:
        """Number of sequences whose text has begun and not ended."""
        return len(self._streams)

    def process(self, jobs: Sequence[Job]) -> list[Decoded]:
        """Process the jobs of one step, in order; return the new visible text."""
        additions: list[tuple[AddTokens, _Stream]] = []
        for job in jobs:
            if isinstance(job, AddTokens):
                stream = self._streams.get(job.sequence_id)
                if stream is not None:  # else it has met its stop string in an earlier step
                    stream.new_token_ids.extend(job.token_ids[:-1] if job.hide_last else job.token_ids)
                    if stream.log is not None:
                        stream.log.expect(job.token_ids, job.logprobs)
                    additions.append((job, stream))
            elif isinstance(job, OpenStream):
                self._open(job)
            elif isinstance(job, AddPromptTokens):
                stream = self._streams.get(job.sequence_id)
                if stream is not None and stream.log is not None:
                    stream.log.add_prompt_tokens(job.token_ids, job.scores)
            else:
                self._streams.pop(job.sequence_id, None)
        self._decode_new([stream for _, stream in additions])
        return [result for job, stream in additions if (result := self._deliver(job, stream)) is not None]

    def _open(self, job: OpenStream) -> None:
        window = list(job.context_token_ids)
        text = self._decoder.decode_batch([window], skip_special_tokens=job.skip_special_tokens)[0]
        settled = self._pieces.settled(window, text, skip_special_tokens=job.skip_special_tokens)
        num_settled = len(settled)
        self._streams[job.sequence_id] = _Stream(
            stop=job.stop,
            stop_tokens=self._pieces.added_tokens(job.stop),
            include_stop=job.include_stop,
            min_tokens=job.min_tokens,
            skip_special_tokens=job.skip_special_tokens,
            window=window,
            text=text,
            num_settled=num_settled,
            last_settled=settled[-1:],
            log=TokenLog(
                self._pieces,
                skip_special_tokens=job.skip_special_tokens,
                is_inside_character=num_settled < len(text),
            )
            if job.return_tokens
            else None,
            tracker=ReasoningTracker(dict(job.marks), job.reasoning) if job.marks or job.reasoning else None,
            num_healed=self._num_healed(job, num_settled) if job.healed_token_ids else 0,
        )

    def _num_healed(self, job: OpenStream, num_settled: int) -> int:
        """Return the number of characters of the healed tokens when decoded after the context."""
        window = [*job.context_token_ids, *job.healed_token_ids]
        text = self._decoder.decode_batch([window], skip_special_tokens=job.skip_special_tokens)[0]
        return len(text) - num_settled

    def _decode_new(self, streams: list[_Stream]) -> None:
        """Decode the new tokens of all streams together.

        One token per round for streams with stop strings, unfinished reasoning or returned tokens, so that
        the place of each token in the text is known. A round of several tokens that ends inside a character
        is undone and decoded one by one: otherwise the boundaries between characters might never be seen.
        """
        while streams := [stream for stream in streams if stream.new_token_ids]:
            for stream in streams:
                self._take_tokens(stream)
            self._decode_windows(streams)
            for stream in streams:
                if stream.round_size > 1 and stream.text.endswith(REPLACEMENT):
                    self._take_back(stream)
                    continue
                if stream.round_size:
                    self._settle(stream)
                is_answer = stream.tracker is None or stream.tracker.is_answer
                is_searched = stream.stop and is_answer and stream.matched_stop is None
                if is_searched and stream.num_output_tokens > stream.min_tokens:
                    self._search_stop(stream)
            self._cut_windows([s for s in streams if len(s.window) > MAX_WINDOW_TOKENS and not s.num_singly])

    def _take_tokens(self, stream: _Stream) -> None:
        """Move the tokens of a round into the window: none if only marked ones were left, or one ends it."""
        if _meets_stop_token(stream, stream.new_token_ids[0]):
            self._end_at_stop_token(stream)
            return
        is_single = stream.stop or stream.num_singly or stream.log is not None
        stream.round_size = 1 if is_single else min(MAX_ROUND_TOKENS, len(stream.new_token_ids))
        if stream.tracker is not None:
            stream.round_size = self._num_unmarked(stream, stream.tracker, stream.round_size)
        stream.num_singly = max(0, stream.num_singly - 1)
        for _ in range(stream.round_size):
            stream.window.append(stream.new_token_ids.popleft())
        stream.num_output_tokens += stream.round_size
        stream.num_unreported_tokens += stream.round_size

    def _end_at_stop_token(self, stream: _Stream) -> None:
        """End the text at its next token, whose own text is shown only if stop strings are."""
        stream.matched_stop = stream.stop_tokens[stream.new_token_ids[0]]
        stream.new_token_ids.clear()
        stream.round_size = 0
        stream.num_output_tokens += 1
        stream.num_unreported_tokens += 1
        tail = strip(_unfinished_tail(stream)[stream.num_healed :])
        shown = stream.matched_stop if stream.include_stop else ""
        if stream.log is not None:
            stream.log.settled(len(tail))
            stream.log.decoded(len(shown), is_whole=stream.include_stop)
        stream.held += tail + shown

    def _take_back(self, stream: _Stream) -> None:
        """Undo _take_tokens, and have its tokens decoded one by one."""
        stream.new_token_ids.extendleft(reversed(stream.window[-stream.round_size :]))
        del stream.window[-stream.round_size :]
        stream.num_output_tokens -= stream.round_size
        stream.num_unreported_tokens -= stream.round_size
        stream.num_singly = stream.round_size

    def _num_unmarked(self, stream: _Stream, tracker: ReasoningTracker, num_tokens: int) -> int:
        """Put leading marked tokens into the text; return how many others can be decoded at once."""
        while stream.new_token_ids and (token_id := stream.new_token_ids[0]) in tracker.marks:
            if _meets_stop_token(stream, token_id):
                return 0
            stream.new_token_ids.popleft()
            stream.num_output_tokens += 1
            stream.num_unreported_tokens += 1
            tail, text = strip(_unfinished_tail(stream)), mark(tracker.marks[token_id])
            if stream.log is not None:
                stream.log.settled(len(tail))
                stream.log.decoded(len(text), is_whole=True)
            _settle_tracked(stream, tracker, tail + text)
            # Later tokens are decoded after this token alone.
            window = [token_id]
            text = self._decoder.decode_batch([window], skip_special_tokens=stream.skip_special_tokens)[0]
            stream.window, stream.text, stream.num_settled = window, text, len(text)
            stream.last_settled = text[-1:]
            stream.boundary, stream.next_boundary = 0, 1
        if stream.new_token_ids and _meets_stop_token(stream, stream.new_token_ids[0]):
            return 0
        num_tokens = min(num_tokens if tracker.is_answer else 1, len(stream.new_token_ids))
        for number in range(num_tokens):
            if stream.new_token_ids[number] in tracker.marks:
                return number
        return num_tokens

    def _decode_windows(self, streams: list[_Stream]) -> None:
        for skip in (True, False):
            chosen = [stream for stream in streams if stream.skip_special_tokens is skip]
            if chosen:
                texts = self._decoder.decode_batch([s.window for s in chosen], skip_special_tokens=skip)
                for stream, text in zip(chosen, texts, strict=True):
                    stream.text = text

    def _settle(self, stream: _Stream) -> None:
        """Move text that later tokens cannot change from the window to `held`."""
        text = stream.text
        unfinished = _num_unfinished(text)
        if not unfinished:
            stream.boundary, stream.next_boundary = stream.next_boundary, len(stream.window)
        elif len(stream.window) - stream.next_boundary > MAX_UNFINISHED_TOKENS:
            unfinished = min(unfinished, MAX_UNFINISHED_BYTES)
        # Decoders with byte fallback show a whole run of bytes as replacement characters while its last
        # character is incomplete, so the text can be shorter than the settled part: then it waits.
        end = len(text) - unfinished
        new = text[stream.num_settled : end]
        if stream.num_healed:
            num_healed = min(stream.num_healed, len(new))
            new, stream.num_healed = new[num_healed:], stream.num_healed - num_healed
        if stream.tracker is not None:
            new = strip(new)
        if stream.log is not None:
            stream.log.decoded(len(new), is_whole=not unfinished)
        if end > stream.num_settled:
            if stream.tracker is None:
                stream.held += new
            else:
                _settle_tracked(stream, stream.tracker, new)
            stream.num_settled = end
            stream.last_settled = text[end - 1]

    def _cut_windows(self, streams: list[_Stream]) -> None:
        """Drop old tokens from long windows if the text of the rest stays the same."""
        for stream in streams:
            num_unfinished_tokens = len(stream.window) - stream.next_boundary
            if num_unfinished_tokens > MAX_UNFINISHED_TOKENS:
                cut = len(stream.window) - MAX_WINDOW_TOKENS
            elif num_unfinished_tokens == 0:
                cut = stream.boundary
            else:
                continue
            rest = stream.window[cut:]
            text = self._decoder.decode_batch([rest], skip_special_tokens=stream.skip_special_tokens)[0]
            pending = stream.text[stream.num_settled :]
            if cut and len(text) > len(pending) and text.endswith(pending):
                stream.window, stream.text = rest, text
                stream.num_settled = len(text) - len(pending)
                stream.last_settled = text[stream.num_settled - 1]
                stream.boundary = max(0, stream.boundary - cut)
                stream.next_boundary = max(0, stream.next_boundary - cut)

    def _search_stop(self, stream: _Stream) -> None:
        """Find the first stop string in the held text and cut the text there.

        Text that left `held` cannot be part of a stop string, and the held text is short, so all of it is
        searched.
        """
        found: tuple[int, str] | None = None
        for stop in stream.stop:
            index = stream.held.find(stop, stream.search_from)
            if index >= 0 and (found is None or index < found[0]):
                found = (index, stop)
        if found is not None:
            index, stream.matched_stop = found
            end = index + len(stream.matched_stop) if stream.include_stop else index
            stream.held = stream.held[:end]
            stream.new_token_ids.clear()

    def _deliver(self, job: AddTokens, stream: _Stream) -> Decoded | None:
        """Return the delta of this step: settled text that cannot begin a stop string, or all at the end."""
        finish_reason, stop_reason, shown = job.finish_reason, job.stop_reason, ""
        if stream.matched_stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stream.matched_stop
        elif job.hide_last:
            if stop_reason is None and _meets_stop_token(stream, job.token_ids[-1]):
                stop_reason = stream.stop_tokens[job.token_ids[-1]]
                shown = stop_reason if stream.include_stop else ""
            stream.num_output_tokens += 1
            stream.num_unreported_tokens += 1
        if stream.tracker is not None and stream.tracker.is_reasoning:
            stream.num_reasoning_tokens = stream.num_output_tokens
        if finish_reason is None:
            end = len(stream.held) - _num_held(stream)
            text, stream.held = stream.held[:end], stream.held[end:]
            stream.search_from = max(0, stream.search_from - end)
            if not text:
                return None
            tokens = stream.log.leave(len(text)) if stream.log is not None else ()
        else:
            text = stream.held
            if stream.matched_stop is None:
                text += _unfinished_tail(stream)[stream.num_healed :] + shown
            del self._streams[job.sequence_id]
            tokens = ()
            if stream.log is not None:
                is_cut = stream.matched_stop is not None
                tokens = stream.log.end(len(text), is_cut=is_cut, hides_last=job.hide_last and not is_cut)
        prompt_tokens = stream.log.take_prompt() if stream.log is not None else ()
        delta = TextDelta(
            text, stream.num_unreported_tokens, finish_reason, stop_reason, tokens, prompt_tokens
        )
        stream.num_unreported_tokens = 0
        return Decoded(job.sequence_id, delta, stream.num_output_tokens, stream.num_reasoning_tokens)


def _meets_stop_token(stream: _Stream, token_id: int) -> bool:
    """Return True if a stop string is the text of the next token, a control token, and may end the output."""
    if token_id not in stream.stop_tokens or stream.num_output_tokens < stream.min_tokens:
        return False
    return stream.tracker is None or not stream.tracker.is_reasoning


def _settle_tracked(stream: _Stream, tracker: ReasoningTracker, text: str) -> None:
    """Settle new text of a stream whose reasoning is tracked."""
    stream.held += text
    if tracker.is_answer:
        return
    num_answer_chars = tracker.advance(text)
    if num_answer_chars is not None:
        stream.search_from = len(stream.held) - num_answer_chars
        if num_answer_chars < len(stream.held):
            stream.num_reasoning_tokens = stream.num_output_tokens


def _num_held(stream: _Stream) -> int:
    """Return how many characters must wait, since they may begin a stop string or reasoning."""
    if stream.tracker is not None and not stream.tracker.is_answer:
        return len(stream.held) if stream.tracker.is_undecided else 0
    return _num_stop_prefix(stream.held[stream.search_from :], stream.stop) if stream.stop else 0


def _num_unfinished(text: str) -> int:
    """Count replacement characters at the end of `text`, which later bytes may complete."""
    return len(text) - len(text.rstrip(REPLACEMENT))


def _unfinished_tail(stream: _Stream) -> str:
    """Return the text shown at the end for bytes that never became a character."""
    if stream.text[max(0, stream.num_settled - 1) : stream.num_settled] != stream.last_settled:
        return REPLACEMENT  # a byte-fallback run whose earlier characters were shown already
    return stream.text[stream.num_settled :]


def _num_stop_prefix(text: str, stop: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest
