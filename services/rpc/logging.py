"""Logs: one line per event, for people (console) or machines (JSON), with request and trace ids where they are known.

Owns: the root logger's one handler and the ids that a context carries. Never: what is logged.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from services.core.errors import ConfigError
from services.rpc.telemetry import trace_id_of

_ids: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("log_ids", default={})  # noqa: B039 never mutated


def configure_logging(
    service: str, instance_id: str, *, level: str = "INFO", form: str = "console", stream: TextIO | None = None
) -> None:
    """Routes all logs of the process to `stream` (stderr). `form`: "console" or "json". Call once, first in `main`."""
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
    """For one record: `logger.info("...", extra=ids(request_id, traceparent))`."""
    return {"request_id": request_id, "trace_id": trace_id_of(traceparent)}


@contextlib.contextmanager
def log_ids(request_id: str, traceparent: str = "") -> Iterator[None]:
    """For all records of this task (and of tasks started in it) until the block ends."""
    token = _ids.set(ids(request_id, traceparent))
    try:
        yield
    finally:
        _ids.reset(token)


def _ids_of(record: logging.LogRecord) -> dict[str, str]:
    known = dict(_ids.get())
    known.update({name: getattr(record, name) for name in ("request_id", "trace_id") if hasattr(record, name)})
    return {name: value for name, value in known.items() if value}


def _moment(record: logging.LogRecord) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC)


class ConsoleFormatter(logging.Formatter):
    """`12:34:56.789 INFO  prefill-0 services.worker.hub: session open [request_id=req-1 trace_id=...]`"""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = instance_id or service

    def format(self, record: logging.LogRecord) -> str:
        clock = _moment(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        known = " ".join(f"{name}={value}" for name, value in _ids_of(record).items())
        line = f"{clock} {record.levelname:<5} {self._who} {record.name}: {record.getMessage()}"
        line += f" [{known}]" if known else ""
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = {"service": service, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _moment(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
            **_ids_of(record),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
