"""A client that goes away takes its work along."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` to its end, or cancels it at once when the client disconnects. True if it ended by itself.

    Only for a request whose body has been read: `receive` then speaks of nothing but the connection.
    """
    working = asyncio.create_task(work, name="http answer")
    watching = asyncio.create_task(_gone(receive), name="http connection")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        return False
    working.result()
    return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
