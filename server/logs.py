"""The log on stderr: lines for people, or JSON for machines, as `log_format` says."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

from server.terminal import STATUS, printable

LogFormat = Literal["pretty", "json"]

PRETTY = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LineFormatter(logging.Formatter):
    """Writes a message in one line; that of an exception's traceback is left as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line of a record, with control characters escaped."""
        return printable(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """Writes a record as one line with a JSON object, in ASCII.

    The record's own `fields`, if it has any, come after time, level, logger and message; a traceback is one
    of the fields, `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": valid(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = valid(self.formatException(record.exc_info))
        if record.stack_info:
            fields["stack"] = valid(record.stack_info)
        return json.dumps(fields)


def valid(text: str) -> str:
    """Return a text with lone surrogates escaped: parsers refuse them."""
    return text.encode("utf-8", "backslashreplace").decode()


def set_up_logging(level: str, log_format: LogFormat = "pretty") -> None:
    """Everything of monoloop to stderr, one line per record; other libraries from warnings up.

    In JSON the lines about what a command is doing, and Python's warnings, are records, too.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else LineFormatter(PRETTY))
    ours = logging.getLogger("monoloop")
    ours.setLevel(level.upper())
    ours.handlers = [handler]
    ours.propagate = False
    if log_format == "json":
        STATUS.setLevel(logging.INFO)
        STATUS.handlers = [handler]
        STATUS.propagate = False
        logging.getLogger().handlers = [handler]
        logging.captureWarnings(True)
