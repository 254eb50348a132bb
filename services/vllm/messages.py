"""Defines how a worker and vLLM's processes talk: JSON, a message a line, over a private Unix socket. Pure.

Every process of vLLM that matters connects by itself and says first who it is (`HELLO`): the front, which has vLLM's
asynchronous engine; the core, where vLLM's scheduler runs; and each rank, which has a part of the model and of the KV.
What one of them sends arrives in order, and says by `at` when it was sent, in seconds of the monotonic clock, which all
share: by that the worker puts in order what several have sent.
Both sides have the worker's own code, so there is one version.
Owns: the form, and the names of the messages. Never: the sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

JsonMessage: TypeAlias = dict[str, Any]

BEAT_S = 0.5
"""Seconds between two BEATs that every process sends, from a thread of its own: one that is stopped does not."""

# From all of vLLM's processes. `who` is FRONT, CORE or RANK.
HELLO, BEAT, BROKEN = "hello", "beat", "broken"
FRONT, CORE, RANK = "front", "core", "rank"

# From the front.
READY, OUTPUT, REFUSED, FIGURES = "ready", "output", "refused", "figures"
# From the core.
STEP, STEPPED = "step", "stepped"
# From a rank.
CACHE, MAPPED, SAVED, SAMPLED, GONE = "cache", "mapped", "saved", "sampled", "gone"
# To the front.
ADD, ABORT = "add", "abort"
# To a rank, with the memory's descriptor.
SLOTS = "slots"


def encode(message: JsonMessage) -> bytes:
    """Returns the message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[JsonMessage]:
        """Yields the messages that are complete with `data`."""
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            yield json.loads(line)
