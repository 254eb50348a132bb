"""Records what the world itself knows of its faults: who was disturbed, and when.

Owns: that record, and the question whether a worker was well and in reach of a router for some time. Never: what the
code under test believes.
"""

from __future__ import annotations

import math

FOR_EVER_S = math.inf


class Record:
    def __init__(self) -> None:
        self._disturbed: list[tuple[frozenset[str], float, float]] = []

    def disturb(self, since_s: float, until_s: float, *names: str) -> None:
        """Notes a disturbance: of a node, if there is one name, or of what lies between two."""
        self._disturbed.append((frozenset(names), since_s, until_s))

    def calm(self, worker: str, router: str, since_s: float, until_s: float) -> bool:
        """Returns whether neither was disturbed, nor the way between them."""
        return not any(
            names <= {worker, router} and begins_s <= until_s and ends_s >= since_s
            for names, begins_s, ends_s in self._disturbed
        )
