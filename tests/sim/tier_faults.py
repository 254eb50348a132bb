"""Draws what goes wrong with a cluster's disks and host memory, with a generator of its own: full, failing and silent
disks, bits that flip, slots that are mixed up, processes that are killed as they write, and files left by others.

No request may fail by any of it. Never: what else goes wrong (`faults`).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from services.kvtransfer.tiers.entry import LABEL_BYTES, Label, fingerprint_bytes
from services.kvtransfer.tiers.host import HostTier
from tests.sim.cluster import Cluster
from tests.sim.disk import SimDisk, inverted
from tests.sim.faults import Faults
from tests.sim.scenario import BUSY_S
from tests.sim.world import World

_OF_OTHERS = fingerprint_bytes("5e" * 16)
_MOST_LEFT = 12
"""Blocks that an earlier run has left in a file."""
_LATEST_S = BUSY_S + 2.0


class TierFaults:
    def __init__(self, world: World, cluster: Cluster, faults: Faults) -> None:
        self._world = world
        self._cluster = cluster
        self._faults = faults
        self._choose = random.Random(f"tier faults of {world.seed}")

    def plan(self) -> None:
        """Makes the plan. To be called when the cluster's `Truth` knows what will be asked."""
        names = [name for name, worker in self._cluster.workers.items() if worker.plan.has_tiers]
        for name in names:
            if name in self._cluster.disks:
                self._leave_behind(name)
        if not names:
            return
        kinds = [self._fill_up, self._fail, self._be_silent, self._rot, self._rot, self._mix_up, self._kill_at_write]
        kinds += [self._read_astray, self._read_astray]
        for _ in range(self._choose.choice((0, 1, 2, 4, 6))):
            kind, name = self._choose.choice(kinds), self._choose.choice(names)
            self._world.at(self._choose.uniform(0.1, _LATEST_S), lambda kind=kind, name=name: kind(name))

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        for disk in self._cluster.disks.values():
            disk.heal()

    def _leave_behind(self, name: str) -> None:
        """Fills a part of the file with what an earlier run may have left: blocks, blocks that were cut off as they
        were written, and those of a model with other weights."""
        worker, choose = self._cluster.workers[name], self._choose
        disk, num_slots = self._cluster.disks[name], worker.plan.num_disk_slots
        fingerprint, size = fingerprint_bytes(worker.host.layout.fingerprint), worker.memory.block_bytes
        known = [(hash, kv) for hash, kv in self._cluster.truth.kv_of[worker.plan.weights].items() if len(kv) == size]
        asked = known[-60:]  # canaries come before
        for slot, (hash, kv) in enumerate(choose.sample(asked, min(len(asked), num_slots, _MOST_LEFT))):
            match choose.choice(("right", "cut off", "of others")):
                case "right":
                    disk.put(slot, Label.of(fingerprint, hash, kv, slot + 1).pack(), kv)
                case "cut off":
                    half = kv[: size // 2] + inverted(kv[size // 2 :])
                    disk.put(slot, Label.of(fingerprint, hash, kv, slot + 1).pack(), half)
                    disk.harm([slot])
                case _:
                    other = inverted(kv)
                    disk.put(slot, Label.of(_OF_OTHERS, hash, other, slot + 1).pack(), other)

    def _with_disk(self, name: str, act: Callable[[SimDisk], None]) -> None:
        if (disk := self._cluster.disks.get(name)) is not None:
            act(disk)

    def _fill_up(self, name: str) -> None:
        def act(disk: SimDisk) -> None:
            self._world.note("disk full", name)
            disk.is_full = True

            def free() -> None:
                disk.is_full = False

            self._world.after(self._choose.uniform(0.1, 3.0), free)

        self._with_disk(name, act)

    def _fail(self, name: str) -> None:
        def act(disk: SimDisk) -> None:
            self._world.note("disk fails", name)
            disk.fails = True

            def recover() -> None:
                disk.fails = False

            self._world.after(self._choose.uniform(0.05, 2.0), recover)

        self._with_disk(name, act)

    def _be_silent(self, name: str) -> None:
        def act(disk: SimDisk) -> None:
            self._world.note("disk silent", name)
            disk.silent_until_s = self._world.now_s + self._choose.choice((0.1, 0.5, 2.5, 5.0))

        self._with_disk(name, act)

    def _rot(self, name: str) -> None:
        """Flips bits of some slots of the disk, or of the host memory."""
        for tier in self._cluster.workers[name].local_tiers:
            if isinstance(tier, HostTier) and len(tier._index):
                self._world.note("host memory rots", name)
                for slot in set(tier._index._slot_of.values()):
                    if self._choose.random() < 0.5:
                        tier._memory[slot * tier._block_bytes + self._choose.randrange(tier._block_bytes)] ^= 1
                        self._cluster.workers[name].rotten_host_slots.add((slot, tier._checksums[slot]))

        def act(disk: SimDisk) -> None:
            self._world.note("disk rots", name)
            for slot, data in disk.slots.items():
                if self._choose.random() < 0.5:
                    disk.harm([slot])
                    start, end = self._choose.choice(((0, LABEL_BYTES), *disk.parts[1:]))
                    data[self._choose.randrange(start, end)] ^= 1 << self._choose.randrange(8)

        self._with_disk(name, act)

    def _mix_up(self, name: str) -> None:
        """Has what was written to one slot be in another, as after a write that went astray."""

        def act(disk: SimDisk) -> None:
            self._world.note("disk mixes up", name)
            slots = sorted(disk.slots)
            moved = self._choose.sample(slots, len(slots))
            disk.slots = dict(zip(slots, [disk.slots[slot] for slot in moved], strict=True))
            disk.harm(slots)

        self._with_disk(name, act)

    def _read_astray(self, name: str) -> None:
        """Has the next reads get blocks of other slots, which are whole, as from a disk that is asked for one and finds
        another."""

        def act(disk: SimDisk) -> None:
            disk.num_astray += self._choose.randrange(1, 6)

        self._with_disk(name, act)

    def _kill_at_write(self, name: str) -> None:
        """Kills the process between two parts of a slot."""

        def act(disk: SimDisk) -> None:
            skipped = self._choose.randrange(12)

            def writing(name: str) -> None:
                nonlocal skipped
                skipped -= 1
                if skipped < 0:
                    disk.on_write = lambda name: None
                    self._world.after(0.0, lambda: self._faults.crash(name))

            disk.on_write = writing

        self._with_disk(name, act)
