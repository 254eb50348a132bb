"""The owner of a router's link to a worker, of which only the end is of interest."""

from __future__ import annotations

import asyncio
from typing import Any

from services.router.sessions import WorkerLink


class Owner:
    """Hears when the link opens, and how it ends. To be made on the event loop."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.lost: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        """Why the link ended, and whether that counts as a crash."""

    def link_opened(self, link: WorkerLink) -> None:
        self.opened.set()

    def worker_message(self, link: WorkerLink, message: Any) -> None:
        pass

    def link_lost(self, link: WorkerLink, reason: str, *, crashed: bool) -> None:
        self.lost.set_result((reason, crashed))

    def link_defect(self, link: WorkerLink, error: Exception) -> None:
        raise error

    def held_leases(self, link: WorkerLink) -> list[bytes]:
        return []
