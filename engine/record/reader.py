"""Reads a record and rebuilds its plans from the current line and the lines before it."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.outputs import FinishReason, GroupPages, Row, RowReadout, SlotInit, StepPlan
from engine.readouts import READOUTS
from engine.record.writer import FORMAT, VERSION
from engine.request import Request, SamplingParams

Tokens = tuple[int, ...]
_SAMPLING = TypeAdapter(SamplingParams)


class Header(BaseModel):
    """The first line: the recorded model and its settings."""

    model: str
    fingerprint: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    token_budget: int
    run_ahead: int
    threads: int | None
    quantization: str | None = None
    kv_dtype: str = "auto"


class Arrived(NamedTuple):
    """A request was queued, `at` seconds after the record began; all times count from there."""

    at: float
    sequence_id: int
    request_id: str
    prompt_token_ids: Tokens


class Planned(NamedTuple):
    """A step went to the device."""

    at: float
    plan: StepPlan


class Completed(NamedTuple):
    """A step returned the tokens of each row."""

    step_id: int
    start: float
    end: float
    tokens: list[Tokens]


class Failed(NamedTuple):
    """A step raised an exception."""

    at: float
    step_id: int


class Ended(NamedTuple):
    """A request ended."""

    at: float
    sequence_id: int
    reason: FinishReason


Event = Arrived | Planned | Completed | Failed | Ended


class _Known(NamedTuple):
    """The state of a sequence after the lines so far. Its `tokens` begin with the prompt."""

    sampling: SamplingParams
    seed: int
    prompt_token_ids: Tokens
    tokens: list[int]
    constraints: tuple[Constraint, ...]


class Record:
    """A record in a file. The constructor and events() raise ValueError if the file is no record.

    After events() `ending` says why the record ends, unless it was closed: the process was killed, or the
    disk was full. `constrain` rebuilds the constraints of a request for a replay: a record has only the
    sampling parameters they are made from.
    """

    def __init__(self, path: Path) -> None:
        self.ending: str | None = None
        self.constrain: Callable[[SamplingParams], tuple[Constraint, ...]] = lambda sampling: ()
        self._path = path
        self._known: dict[int, _Known] = {}
        self._slots: dict[int, int] = {}
        self._scheduled: dict[int, int] = {}
        self._num_pages: dict[int, int] = {}
        self._decode: list[int] = []
        self._plans: dict[int, StepPlan] = {}
        try:
            with path.open("rb") as file:
                line = orjson.loads(file.readline())
            if line["format"] != FORMAT:
                raise ValueError
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from None
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path} is no record") from None
        if line.get("version") != VERSION:
            raise ValueError(f"{path} is of version {line.get('version')}; this program reads {VERSION}")
        try:
            self.header = Header.model_validate(line)
        except ValidationError as error:
            raise ValueError(f"{path} has a broken first line: {error.errors()[0]['msg']}") from None

    def events(self) -> Iterator[Event]:
        """Yield all events in order. Call this once."""
        with self._path.open("rb") as file:
            file.readline()
            for number, text in enumerate(file, 2):
                if not text.endswith(b"\n"):
                    self.ending = f"it ends in the middle of line {number}"
                    return
                try:
                    line = orjson.loads(text)
                    if "closed" in line:
                        return
                    yield self._event(line)
                except (ValueError, TypeError, LookupError) as error:
                    raise ValueError(f"{self._path}, line {number}: makes no sense ({error!r})") from None
        self.ending = "it was not closed"

    def _event(self, line: dict[str, Any]) -> Event:
        if "tokens" in line:
            return self._completed(line)
        if "plan" in line:
            return self._planned(line)
        at: float = line["at"]
        if "arrive" in line:
            return self._arrived(line, at)
        if "failed" in line:
            self._plans.pop(line["failed"], None)
            return Failed(at, line["failed"])
        self._known.pop(line["end"], None)
        return Ended(at, line["end"], FinishReason(line["reason"]))

    # All numbers are checked: they index memory of the device.

    def _check_pages(self, pages: Iterable[int]) -> None:
        if not all(0 <= page < self.header.num_pages for page in pages):
            raise ValueError("a page outside the pool")

    def _take_pages(self, sequence_id: int, pages: GroupPages, end: int, *, is_new: bool = False) -> None:
        """Check and count the pages of a sequence whose tokens up to `end` are computed on them."""
        self._check_pages(page for group in pages for page in group)
        held = (0 if is_new else self._num_pages[sequence_id]) + (len(pages[0]) if pages else 0)
        self._num_pages[sequence_id] = held
        if held * self.header.page_size < end:
            raise ValueError("more tokens than the sequence has pages for")

    def _arrived(self, line: dict[str, Any], at: float) -> Arrived:
        if "prompt_of" in line:
            prompt = self._known[line["prompt_of"]].prompt_token_ids
        else:
            prompt = tuple(line["prompt"])
        sampling = _SAMPLING.validate_python(line["sampling"])
        try:
            Request(line["request_id"], prompt, sampling).check(self.header.vocab_size)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        self._known[line["arrive"]] = _Known(
            sampling, line["seed"], prompt, list(prompt), self.constrain(sampling)
        )
        return Arrived(at, line["arrive"], line["request_id"], prompt)

    def _planned(self, line: dict[str, Any]) -> Planned:
        ids = self._decode = line.get("decode", self._decode)
        rows: list[Row] = []
        grow = dict(line.get("grow", ()))
        for index, sequence_id in enumerate(ids):
            start = self._scheduled[sequence_id]
            new_pages = _pages(grow.get(index, ()))
            self._take_pages(sequence_id, new_pages, start + 1)
            self._scheduled[sequence_id] = start + 1
            rows.append(Row(sequence_id, self._slots[sequence_id], start, new_pages=new_pages))
        rows += [self._row(*columns) for columns in line.get("rows", ())]
        copies = [(source, target) for source, target in line.get("copies", ())]
        self._check_pages(page for pair in copies for page in pair)
        plan = self._plans[line["plan"]] = StepPlan.of(line["plan"], rows, copies)
        return Planned(line["at"], plan)

    def _row(
        self,
        sequence_id: int,
        slot: int,
        start: int,
        count: int,
        num_logits: int,
        pages: list[list[int]],
        is_new: bool,
        drafts: list[int],
        readouts: list[tuple[str, dict[str, Any], int, int, bool]],
    ) -> Row:
        known = self._known[sequence_id]
        num_prompt = len(known.prompt_token_ids)
        token_ids = (*known.tokens[start : start + count - len(drafts)], *drafts)
        if not (0 <= slot < self.header.max_num_seqs and start >= 0 and len(token_ids) == count > 0):
            raise ValueError("a slot or tokens that do not exist")
        if not (all(0 <= token_id < self.header.vocab_size for token_id in drafts) and num_logits <= count):
            raise ValueError("drafts that the vocabulary does not have, or more logits than tokens")
        new_pages = _pages(pages)
        self._take_pages(sequence_id, new_pages, start + count, is_new=is_new)
        init = None
        if is_new:
            outputs = tuple(known.tokens[num_prompt:])
            init = SlotInit(known.sampling, known.seed, known.prompt_token_ids, outputs, known.constraints)
        self._slots[sequence_id] = slot
        self._scheduled[sequence_id] = start + count
        parts = tuple(_readout(known.prompt_token_ids, *columns) for columns in readouts)
        if not all(start <= part.start and part.start + part.num_tokens <= start + count for part in parts):
            raise ValueError("a readout of tokens that the row does not compute")
        return Row(sequence_id, slot, start, token_ids, num_logits, new_pages, init, parts)

    def _completed(self, line: dict[str, Any]) -> Completed:
        tokens = [(found,) if isinstance(found, int) else tuple(found) for found in line["sampled"]]
        plan = self._plans.pop(line["tokens"])
        for sequence_id, sampled in zip(plan.sequence_ids, tokens, strict=True):
            if sequence_id in self._known:
                self._known[sequence_id].tokens.extend(sampled)
        return Completed(line["tokens"], line["from"], line["to"], tokens)


def _pages(groups: Iterable[Iterable[int]]) -> GroupPages:
    return tuple(tuple(pages) for pages in groups)


def _readout(
    prompt: Tokens, kind: str, fields: dict[str, Any], start: int, count: int, is_last: bool
) -> RowReadout:
    readout = TypeAdapter(READOUTS[kind]).validate_python(fields)
    return RowReadout(readout, start, count, prompt[start + 1 : start + 1 + count], is_last)
