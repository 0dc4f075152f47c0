"""The files of `monoloop batch`: requests and results in OpenAI's batch format, one JSON object a line."""

import codecs
import fcntl
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from server.ids import new_id

MAX_SHOWN = 100  # characters of a value in a message
# How each result begins, which tells one that was cut off from a line of some other file.
RESULT_ID = "batch_req_"
RESULT_MARK = f'{{"id":"{RESULT_ID}'.encode()
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class BatchFileError(Exception):
    """A file of the batch cannot be used. The message names it."""


class BadLine(Exception):
    """A line is no request of a batch. `custom_id` is known if the line has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class Job(NamedTuple):
    """A request of a batch; `body` is JSON."""

    custom_id: str
    url: str
    body: bytes


def read_job(line: bytes, urls: Collection[str]) -> Job:
    """Return the request in a line, whose url must be one of `urls`. Raises BadLine."""
    try:
        found = orjson.loads(line)
    except ValueError as error:
        raise BadLine(f"the line is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadLine("the line is not a JSON object")
    custom_id, method, url, body = (found.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine("custom_id must be text")
    if method != "POST":
        raise BadLine(f"method must be POST, not {shown(method)}", custom_id)
    if not isinstance(url, str) or url not in urls:
        raise BadLine(f"url must be one of {', '.join(sorted(urls))}, not {shown(url)}", custom_id)
    if not isinstance(body, dict):
        raise BadLine("body must be an object", custom_id)
    if body.get("stream"):
        raise BadLine("a request of a batch cannot be streamed: remove stream from its body", custom_id)
    return Job(custom_id, url, orjson.dumps(body))


def shown(value: Any) -> str:
    """Return a value of a request as a part of a message."""
    return f"{value!r:.{MAX_SHOWN}}"


def check_files(source: Path, target: Path) -> None:
    """Check that requests can be read twice, and are not where results go. Raises BatchFileError."""
    for path in (source, target):
        if str(path) == "-":
            raise BatchFileError("-: neither stdin nor stdout can be used; name a file")
    try:
        if not source.is_file() and source.exists():
            raise BatchFileError(f"{source}: is no regular file, and requests are read twice: name a file")
        if target.exists() and source.samefile(target):
            raise BatchFileError(f"{target}: holds the requests; name another file for the results")
    except OSError as error:
        raise BatchFileError(f"{error.filename}: cannot be read ({error.strerror})") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers from 1. Raises BatchFileError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    if line.startswith(UTF_16):
                        raise BatchFileError(f"{path}: is text in UTF-16; save it as UTF-8")
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line := line.strip():
                    yield number, line
    except OSError as error:
        raise BatchFileError(f"{path}: cannot be read ({error.strerror})") from None


def is_torn(line: bytes, *, is_first: bool) -> bool:
    """Check that a file's last line is a part of a result, or the zeros that a crash leaves after one."""
    return RESULT_MARK.startswith(line[: len(RESULT_MARK)]) or (not is_first and not line.strip(b"\0\n"))


class Results:
    """The file of results: those of an earlier run are kept, and new ones are appended.

    Only one process at a time may have it open. Each result is handed to the system as soon as it is written.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and drop a last result that is not whole. Raises BatchFileError."""
        self.custom_ids: set[str] = set()
        self.lines: set[int] = set()  # of the input, with errors that have no custom_id
        self.num_errors = 0
        self._path = path
        if path.exists() and not path.is_file():
            raise BatchFileError(f"{path}: is no file that results can be appended to")
        try:
            self._file = path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._read()
            except BaseException:
                self._file.close()
                raise
        except BlockingIOError:
            raise BatchFileError(f"{path}: another process writes to it") from None
        except OSError as error:
            raise BatchFileError(f"{path}: cannot be written ({error.strerror})") from None

    def __len__(self) -> int:
        return len(self.custom_ids) + len(self.lines)

    def _read(self) -> None:
        """Take note of the results that are there."""
        self._file.seek(0)
        size = 0
        for number, line in enumerate(self._file, 1):
            try:
                result = orjson.loads(line)
            except ValueError:
                result = None
            if not isinstance(result, dict) or not {"custom_id", "response", "error"} <= result.keys():
                if is_torn(line, is_first=number == 1) and not self._file.peek(1):
                    self._file.truncate(size)
                    return
                raise BatchFileError(
                    f"{self._path}: line {number} is no result of a batch; name another file"
                )
            self._note(result)
            size += len(line)
        if size and not line.endswith(b"\n"):  # an editor's file
            self._file.write(b"\n")

    def _note(self, result: dict[str, Any]) -> None:
        custom_id, response, error = result["custom_id"], result["response"], result["error"]
        if isinstance(custom_id, str):
            self.custom_ids.add(custom_id)
        elif isinstance(error, dict) and isinstance(error.get("line"), int):
            self.lines.add(error["line"])
        if not isinstance(response, dict) or response.get("status_code") != 200:
            self.num_errors += 1

    def has(self, number: int, custom_id: str | None) -> bool:
        """Return True if there is a result of the request, or of the line without a custom_id."""
        return number in self.lines if custom_id is None else custom_id in self.custom_ids

    def add_response(self, job: Job, status_code: int, request_id: str, body: bytes) -> None:
        """Write the response to a request. Raises BatchFileError."""
        response = {"status_code": status_code, "request_id": request_id, "body": orjson.loads(body)}
        self._write(job.custom_id, response, None)

    def add_error(self, number: int, custom_id: str | None, message: str) -> None:
        """Write that a line of the input is no request. Raises BatchFileError."""
        self._write(custom_id, None, {"code": "invalid_request", "message": message, "line": number})

    def _write(
        self, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        result = {
            "id": f"{RESULT_ID}{new_id()}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        try:
            self._file.write(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
            self._file.flush()
        except OSError as failure:
            raise BatchFileError(f"{self._path}: cannot be written ({failure.strerror})") from None
        self._note(result)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # what could not be written before cannot be written now
            self._file.close()
