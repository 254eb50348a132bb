"""Sends comments in an event stream that says nothing for a while, so that nobody between takes it for dead.

Owns: when. Never: what they say, or bytes on the wire (reply.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from services.router.front.http.reply import Reply


@contextlib.asynccontextmanager
async def kept_alive(reply: Reply, every_s: float, words: Callable[[], str]) -> AsyncIterator[None]:
    """Sends a comment with these words whenever nothing was sent for `every_s` seconds within the block; 0: never."""
    task = asyncio.create_task(_keep_alive(reply, every_s, words), name="http keepalive") if every_s else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # where the client is gone, that is noticed elsewhere


async def _keep_alive(reply: Reply, every_s: float, words: Callable[[], str]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        left_s = reply.touched_s + every_s - loop.time()
        if left_s > 0:
            await asyncio.sleep(left_s)
        else:
            reply.comment(words())
