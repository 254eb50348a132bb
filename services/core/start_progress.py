"""Describes how far a process has come with its start, as it tells its supervisor. The module is pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_KEY = "progress"
_MOST_CHARS = 80


@dataclass(frozen=True, slots=True)
class StartProgress:
    stage: str
    """What the process does now, such as "load"; stages follow one another."""
    detail: str = ""
    """Which part of the stage."""
    done: int = 0
    """Parts of the stage that are done."""
    total: int = 0
    """Parts of the stage; 0 if that is not known."""


TellProgress = Callable[[StartProgress], None]


def tell_nobody(progress: StartProgress) -> None:
    """Takes progress that nobody wants to know."""


def to_line(progress: StartProgress) -> bytes:
    """Returns the progress as one line of JSON, below the size of which a write to a pipe is never split."""
    return json.dumps({_KEY: asdict(progress)}).encode() + b"\n"


def from_report(report: Any) -> StartProgress | None:
    """Returns the progress that a parsed line holds; None if it is another report.

    Raises ValueError, KeyError or TypeError if it is malformed.
    """
    if _KEY not in report:
        return None
    about = report[_KEY]
    stage, detail = (str(about[name])[:_MOST_CHARS] for name in ("stage", "detail"))
    return StartProgress(stage, detail, int(about["done"]), int(about["total"]))
