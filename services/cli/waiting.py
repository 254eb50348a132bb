"""Shows on standard error that something goes on, and for how long, while nothing else is printed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows the words with the seconds, on a terminal in one line that goes at the end; elsewhere the words once.

    Yields a function that takes other words.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what)
        yield lambda words: progress.update(task, description=words)
