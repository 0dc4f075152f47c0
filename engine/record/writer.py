"""Records a run, its arrivals, plans and tokens, as lines of JSON for `monoloop replay`.

A thread of its own makes and writes the lines: the loop only hands over values that do not change any more.
docs/record.md describes the lines.
"""

import logging
import os
import threading
import time
from collections import abc
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import orjson

from engine.config import EngineConfig
from engine.listener import StepListener
from engine.model_info import ModelInfo
from engine.outputs import FinishReason, StepOutput, StepPlan
from engine.request import Request
from engine.schedule.sequence import Sequence

logger = logging.getLogger("monoloop.engine")

FORMAT = "monoloop-record"
VERSION = 2
# Most numbers (tokens, rows) that wait for the disk: about 100 MB of Python ints, a minute of a busy server.
MAX_PENDING = 4_000_000


Line = dict[str, Any]


class Recorder(StepListener):
    """Writes a record. Its methods are called on the loop and do not block, except open() and close().

    If the disk is full or slower than the engine, the record ends with a line in the log, and the engine
    continues.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._events: SimpleQueue[tuple[int, abc.Callable[..., Line], tuple[Any, ...]] | None] = SimpleQueue()
        self._num_put = 0  # numbers handed over, counted by the loop
        self._num_written = 0  # and written, counted by the thread
        self._has_stopped = False
        self._start = 0.0
        self._decode: list[int] = []
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Recorder | None":
        """Open a recorder if the settings name a file for it. Raises ValueError, naming the setting."""
        return None if config.record is None else cls.open(config.record)

    @classmethod
    def open(cls, path: Path) -> "Recorder":
        """Create the file, readable by its owner only. Raises ValueError, naming the setting."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ValueError(f"record: {path} exists already, and is not overwritten") from None
        except OSError as error:
            raise ValueError(f"record: {path} cannot be written ({error.strerror})") from None
        return cls(path, os.fdopen(descriptor, "wb"))

    def discard(self) -> None:
        """Remove the file, since nothing will be recorded."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def started(self, model: ModelInfo, config: EngineConfig, token_budget: int, fingerprint: str) -> None:
        """Write the header and start the thread."""
        self._start = time.perf_counter()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "started": time.time(),
            "model": config.model,
            "fingerprint": fingerprint,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "kv_dtype": model.kv_dtype,
            "device": model.device.partition(":")[0],
            "vocab_size": model.vocab_size,
            "max_model_len": model.max_model_len,
            "num_pages": model.num_pages,
            "page_size": model.page_size,
            "max_num_seqs": config.max_num_seqs,
            "token_budget": token_budget,
            "run_ahead": config.run_ahead,
            "threads": config.threads,
        }
        self._write(header)
        self._thread.start()

    # Called by the loop

    def arrived(self, sequences: abc.Sequence[Sequence], now: float) -> None:
        """Record requests with one prompt."""
        first = sequences[0].id
        for sequence in sequences:
            size = sequence.num_prompt_tokens if sequence.id == first else 1
            self._put(size, _arrival, sequence.id, first, sequence.seed, sequence.request, self._seconds(now))

    def planned(self, plan: StepPlan, now: float) -> None:
        """Record the plan of a step."""
        self._put(plan.num_tokens, self._plan, plan, self._seconds(now))

    def completed(self, output: StepOutput) -> None:
        """Record the tokens of a step."""
        self._put(len(output.tokens), self._tokens, output)

    def failed(self, plan: StepPlan, now: float) -> None:
        """Record that a step raised an exception."""
        self._put(1, dict, (("failed", plan.step_id), ("at", self._seconds(now))))

    def ended(self, sequence_id: int, reason: FinishReason, now: float) -> None:
        """Record the end of a request."""
        self._put(1, dict, (("end", sequence_id), ("at", self._seconds(now)), ("reason", reason)))

    def close(self) -> None:
        """Write the remaining lines and end the thread. Waits for the disk."""
        self._events.put(None)
        self._thread.join()

    def _put(self, size: int, make: abc.Callable[..., Line], *values: Any) -> None:
        """Have the thread make a line of `values`, which hold about `size` numbers."""
        if self._has_stopped:
            return
        if self._num_put - self._num_written > MAX_PENDING:
            self._has_stopped = True
            logger.error("%s ends here: the disk is slower than the engine", self._path)
            return
        self._num_put += size
        self._events.put((size, make, values))

    # Run by the thread

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                size, make, values = event
                self._write(make(*values))
                self._num_written += size
                if self._events.empty():
                    self._file.flush()
            if not self._has_stopped:
                self._write({"closed": self._seconds(time.perf_counter())})
        except Exception:
            self._has_stopped = True
            logger.exception("%s ends here", self._path)
        finally:
            with suppress(OSError):
                self._file.close()

    def _plan(self, plan: StepPlan, at: float) -> Line:
        line: Line = {"plan": plan.step_id, "at": at}
        decode = plan.sequence_ids[: plan.num_decode_rows]
        if decode != self._decode:
            line["decode"] = self._decode = decode
        grow = [(index, pages) for index, pages in plan.new_pages.items() if index not in plan.token_ids]
        if grow:
            line["grow"] = grow
        if plan.token_ids:
            line["rows"] = [_row(plan, index) for index in plan.token_ids]
        if plan.page_copies:
            line["copies"] = plan.page_copies
        return line

    def _tokens(self, output: StepOutput) -> Line:
        return {
            "tokens": output.step_id,
            "from": self._seconds(output.start_seconds),
            "to": self._seconds(output.end_seconds),
            "sampled": [sampled[0] if len(sampled) == 1 else sampled for sampled in output.tokens],
        }

    def _seconds(self, moment: float) -> float:
        """Return the seconds since the record began, to the microsecond."""
        return round(moment - self._start, 6)

    def _write(self, line: Line) -> None:
        self._file.write(orjson.dumps(line, default=_plain, option=orjson.OPT_APPEND_NEWLINE))


def _arrival(sequence_id: int, first: int, seed: int, request: Request, at: float) -> Line:
    line: Line = {"arrive": sequence_id, "at": at, "request_id": request.request_id, "seed": seed}
    line["sampling"] = request.sampling
    if sequence_id == first:
        line["prompt"] = request.prompt_token_ids
    else:
        line["prompt_of"] = first
    return line


def _row(plan: StepPlan, index: int) -> tuple[Any, ...]:
    """Return the numbers of a row with token ids; the ids themselves are known, but for drafts."""
    num_logits = plan.num_logits[index]
    drafts = plan.token_ids[index][1 - num_logits :] if num_logits > 1 else ()
    readouts = [
        (type(part.readout).__name__, asdict(part.readout), part.start, part.num_tokens, part.is_last)
        for part in plan.readouts.get(index, ())
    ]
    columns = (plan.sequence_ids[index], plan.slots[index], plan.starts[index], plan.query_lens[index])
    is_new = index in plan.inits
    return (*columns, num_logits, plan.new_pages.get(index, ()), is_new, drafts, readouts)


def _plain(value: Any) -> Any:
    """Return a set as a list, since JSON has no sets."""
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be recorded")
