"""Keeps tasks that have an owner: each is referenced until it is over, and its failure is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class OwnedTasks:
    """Keeps a set of tasks with one owner. Make it on the event loop, and call `close` at the end."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        """Used as a set that keeps its order, so that a simulated run is the same each time."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancels the tasks that still run, and waits for them."""
        while self._tasks:  # one that is cancelled may leave something to be done to another
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks take them out

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
