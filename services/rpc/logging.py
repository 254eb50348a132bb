"""Formats logs: one line per event, for people (console) or machines (JSON), with request and trace ids where known.

Owns: the root logger's one handler, the ids that a context carries, and that an event cannot break out of its line, or
make it endless: logs may hold text from clients and peers, and a terminal obeys control characters. Never: what is
logged.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

from services.core.errors import ConfigError
from services.core.printable import printable
from services.rpc.telemetry import trace_id_of

MOST_CHARS = 16_384
"""The most characters of one event: what peers send stands in some, and may have megabytes. A traceback has no bound
but its own."""
_MOST_ID_CHARS = 256

_ids: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("log_ids", default={})  # noqa: B039 never mutated


def configure_logging(
    service: str, instance_id: str, *, level: str = "INFO", form: str = "console", stream: TextIO | None = None
) -> None:
    """Routes all logs of the process to `stream` (default: stderr). Call it once, first in `main`.

    `form` is "console" or "json". Raises ConfigError for an unknown level or form.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level: {level!r} is not one of debug, info, warning, error")
    formatter = {"console": ConsoleFormatter, "json": JsonFormatter}.get(form)
    if formatter is None:
        raise ConfigError(f"--log-format: {form!r} is not one of console, json")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter(service, instance_id))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    logging.captureWarnings(True)


def ids(request_id: str, traceparent: str = "") -> dict[str, str]:
    """Returns the `extra` of one record: `logger.info("...", extra=ids(request_id, traceparent))`."""
    return {"request_id": request_id, "trace_id": trace_id_of(traceparent)}


@contextlib.contextmanager
def log_ids(request_id: str, traceparent: str = "") -> Iterator[None]:
    """Adds the ids to all records of this task, and of tasks started in it, until the block ends."""
    token = _ids.set(ids(request_id, traceparent))
    try:
        yield
    finally:
        _ids.reset(token)


def _ids_of(record: logging.LogRecord) -> dict[str, str]:
    known = dict(_ids.get())
    known.update({name: getattr(record, name) for name in ("request_id", "trace_id") if hasattr(record, name)})
    return {name: value[:_MOST_ID_CHARS] for name, value in known.items() if value}


def _message_of(record: logging.LogRecord) -> str:
    message = record.getMessage()
    num_left = len(message) - MOST_CHARS
    return message if num_left <= 0 else f"{message[:MOST_CHARS]} and {num_left} more characters"


def _moment(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)


class ConsoleFormatter(logging.Formatter):
    """Writes lines for people.

    Example: `12:34:56.789 INFO  prefill-0 services.worker.session: session open [request_id=req-1 trace_id=...]`
    """

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = instance_id or service

    def format(self, record: logging.LogRecord) -> str:
        clock = _moment(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        known = " ".join(f"{name}={value}" for name, value in _ids_of(record).items())
        line = f"{clock} {record.levelname:<5} {self._who} {record.name}: {_message_of(record)}"
        lines = [line + (f" [{known}]" if known else "")]
        if record.exc_info:
            # Indented, because an error may quote lines that look like another record.
            lines += ["  " + line for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(map(printable, lines))


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = {"service": service, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str] = {
            "time": _moment(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message_of(record),
            **self._who,
            **_ids_of(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        # JSON escapes line ends itself.
        return json.dumps({name: printable(value, keep="\n") for name, value in entry.items()}, ensure_ascii=False)
