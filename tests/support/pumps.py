"""Runs the two ways of a connection that a test passes on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_either_ends(*pumps: Coroutine[Any, Any, None]) -> None:
    """Runs them side by side until one ends, however it does. None of them runs any more when this returns."""
    tasks = [asyncio.ensure_future(pump) for pump in pumps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
