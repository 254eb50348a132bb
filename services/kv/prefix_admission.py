"""Decides how much of a prefix a worker brings into its pool before it computes the rest. Pure.

Owns: the rule. Never: the blocks. What is brought is cached and held by nobody until its sequence is admitted, and may
be evicted before: so a prefix is brought only into room that nothing else there waits for.
"""

from __future__ import annotations

from services.kv.handoff_admission import EngineRoom

MOST_BRINGS = 4
"""The most prefixes that a worker brings at once: they share its connections and its copy threads."""
MOST_BROUGHT_SHARE = 0.25
"""The most of the pool that they may take, all together."""
_WATERMARK = 0.05
"""The share of the pool that is left for the growth of running sequences; an idle worker ignores it."""


def most_to_bring(num_blocks: int, num_bringing: int) -> int:
    """Returns how many blocks may be brought beside those that are being brought, in a pool of `num_blocks`."""
    return max(0, int(num_blocks * MOST_BROUGHT_SHARE) - num_bringing)


def why_not_brought(num_fresh: int, room: EngineRoom) -> str | None:
    """Returns why this number of fresh blocks may not be taken for a prefix now, None if they may."""
    if room.num_preempted:
        return "preempted sequences come back first"
    is_idle = room.num_sequences == 0
    kept = 0 if is_idle else int(_WATERMARK * room.num_blocks) + room.num_wanted
    if num_fresh + kept > room.num_available:
        return f"{num_fresh} blocks are too many beside {kept} that others need, of {room.num_available}"
    return None
