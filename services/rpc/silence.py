"""Judges whether the peer of a session still sends and reads, independently of the session's reader and writer.

Owns: the one limit on both. Never: the streams, or what follows. A task of its own awaits the verdict, so that a writer
that waits for ever cannot hide the peer's silence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from services.core.clock import SOONEST_S, Clock


class PeerWatch:
    """Watches the peer of one stream, from the stream's start."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        """`clock` should count awake time (`core.awake`) if the process may be suspended."""
        self._clock = clock
        self._silence_s = silence_s
        self._heard_s = clock.now()
        self._writing_since_s: float | None = None

    def heard(self) -> None:
        """Notes that a message of the peer was received."""
        self._heard_s = self._clock.now()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Notes, within the block, that a message is being written.

        The write does not end while the peer reads nothing.
        """
        self._writing_since_s = self._clock.now()
        try:
            yield
        finally:
            self._writing_since_s = None

    async def verdict(self) -> str:
        """Returns when the peer has sent nothing, or a write has not ended, for `silence_s`; the text says which."""
        while True:
            now = self._clock.now()
            silent_s = self._heard_s + self._silence_s
            if now >= silent_s:
                return f"silent for {self._silence_s:g} s"
            if self._writing_since_s is not None:
                stuck_s = self._writing_since_s + self._silence_s
                if now >= stuck_s:
                    return f"takes nothing for {self._silence_s:g} s"
                silent_s = min(silent_s, stuck_s)
            await asyncio.sleep(max(silent_s - now, SOONEST_S))
