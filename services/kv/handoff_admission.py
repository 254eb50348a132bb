"""Decides whether a decode worker admits a handoff now. Pure.

Owns: the rule, and the memory of the oldest handoff that was refused. Never: the blocks, or what is done with a
refusal. A worker admits or refuses at once: a queue here would be hidden from the router, which may know a better
place. A command carries the handoff's age. After the worker has refused an aged handoff, it refuses younger ones too,
until the aged one fits or has not been offered again for a while, so that short prompts do not starve a long one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Describes how much room an engine has at one moment."""

    num_available: int
    """Free and cached blocks, without the cached prefix of the sequence in question."""
    num_blocks: int
    """Blocks of the whole pool."""
    num_sequences: int
    """Running and waiting sequences, adopted ones included."""
    max_num_seqs: int
    """Most sequences in a step."""
    num_preempted: int
    """Preempted sequences that wait to run again; they come before new sequences."""
    num_wanted: int = 0
    """The most blocks that waiting sequences will take, which have none yet."""


@dataclass(frozen=True, slots=True)
class Refusal:
    needed_blocks: int
    missing_blocks: int
    """How many more blocks must become available; 0 if there is another reason."""
    reason: str


class AdmissionPolicy:
    """Admits or refuses handoffs, and remembers the oldest aged one that it refused."""

    def __init__(self, *, watermark: float = 0.05, aged_after_s: float = 1.0, forget_after_s: float = 2.0) -> None:
        """`watermark` is the share of the pool kept for the growth of running sequences; an idle worker ignores it.

        A handoff is aged after `aged_after_s`, and forgotten if it is not offered again for `forget_after_s`.
        """
        self._watermark = watermark
        self._aged_after_s = aged_after_s
        self._forget_after_s = forget_after_s
        self._aged_key: bytes | None = None
        self._aged_born_s = 0.0
        self._aged_seen_s = 0.0

    def decide(
        self,
        key: bytes,
        needed_blocks: int,
        age_s: float,
        room: EngineRoom,
        num_importing: int,
        now: float,
        *,
        num_answers: int = 1,
    ) -> Refusal | None:
        """Returns None to admit the handoff, or the refusal. Each of its answers is a sequence of the batch.

        `key` names the handoff over all its attempts (its lease id), and `age_s` is how long it has waited.
        `num_importing` counts handoffs that were admitted and have not reached the engine yet.
        """
        refusal = self._refusal(key, needed_blocks, now - age_s, room, num_importing, now, num_answers)
        if refusal is None:
            if key == self._aged_key:
                self._aged_key = None
        elif age_s >= self._aged_after_s and self._oldest(key, now - age_s, now):
            self._aged_key, self._aged_born_s, self._aged_seen_s = key, now - age_s, now
        return refusal

    def _refusal(
        self,
        key: bytes,
        needed: int,
        born_s: float,
        room: EngineRoom,
        num_importing: int,
        now: float,
        num_answers: int,
    ) -> Refusal | None:
        if not self._oldest(key, born_s, now):
            return Refusal(needed, 0, "an older handoff is waiting")
        if room.num_preempted:
            return Refusal(needed, 0, "preempted sequences come back first")
        num_sequences = room.num_sequences + num_importing
        # More answers than a step has sequences take turns: such a handoff waits for an idle worker, and no longer.
        if num_sequences + min(num_answers, room.max_num_seqs) > room.max_num_seqs:
            return Refusal(needed, 0, "batch is full")
        idle = num_sequences == 0 and room.num_preempted == 0
        reserve = 0 if idle else int(self._watermark * room.num_blocks)
        missing = needed + reserve - room.num_available
        return Refusal(needed, missing, "not enough blocks") if missing > 0 else None

    def _oldest(self, key: bytes, born_s: float, now: float) -> bool:
        """Returns whether no older aged handoff is still being offered here."""
        if self._aged_key is None or now - self._aged_seen_s > self._forget_after_s:
            return True
        return key == self._aged_key or born_s <= self._aged_born_s
