"""Checks tiers: that an index and what lies in its slots agree, and that routers know what a worker has.

Never: that no token is computed from a wrong block; `memory` and `engine` see to that.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.core.hashing import BlockHash, pack_hashes, unpack_hashes
from services.kvtransfer.tiers.disk import DiskTier
from services.kvtransfer.tiers.entry import fingerprint_bytes, unpack_label
from services.kvtransfer.tiers.host import HostTier
from tests.sim.cluster import Cluster
from tests.sim.router import SimRouter
from tests.sim.worker import SimWorker
from tests.sim.world import World


def check_tiers(world: World, worker: SimWorker) -> None:
    """Asserts that each slot is in one state, and that the slot of a block holds that block, unless it was harmed."""
    for tier in worker.local_tiers:
        assert isinstance(tier, HostTier | DiskTier)
        tier._index.check()
        held = _in_host_memory(worker, tier) if isinstance(tier, HostTier) else _on_disk(world, worker, tier)
        for slot, hash, block in held:
            right = worker.may_hold(hash, block)
            world.require(right, f"{worker.plan.name}: slot {slot} of its {tier.name} tier holds another block")


def _in_host_memory(worker: SimWorker, tier: HostTier) -> Iterator[tuple[int, BlockHash, bytes]]:
    for hash, slot in tier._index._slot_of.items():
        if (slot, tier._checksums[slot]) not in worker.rotten_host_slots:
            with tier._slot(slot) as block:
                yield slot, hash, bytes(block)


def _on_disk(world: World, worker: SimWorker, tier: DiskTier) -> Iterator[tuple[int, BlockHash, bytes]]:
    disk = worker.disk
    assert disk is not None
    fingerprint = fingerprint_bytes(worker.host.layout.fingerprint)
    for hash, slot in tier._index._slot_of.items():
        if slot not in disk.doubtful:
            label, block = unpack_label(disk.label(slot)), disk.block(slot)
            fits = label is not None and label.fits(fingerprint, hash, block)
            world.require(fits, f"{worker.plan.name}: slot {slot} of its file is not what the index says")
            yield slot, hash, block


def not_settled(cluster: Cluster) -> list[str]:
    """Returns which tiers are still at work, and which routers are told something else than is there."""
    busy = []
    for worker in cluster.present:
        tiers = worker.host.tiers
        if tiers is None:
            continue
        if any(tier._index._writing for tier in worker.local_tiers):  # type: ignore[attr-defined]
            busy.append(f"{worker.plan.name} writes to its tiers")
        if len(tiers._idle) < len(tiers._readers):
            busy.append(f"{worker.plan.name} reads from its tiers")
        routers = [router for router in cluster.present_routers if worker in cluster.within_reach(router)]
        uninformed = [router.node.name for router in routers if not _is_told(router, worker)]
        busy += [f"{router} does not know what {worker.plan.name} has" for router in uninformed]
    return busy


def _is_told(router: SimRouter, worker: SimWorker) -> bool:
    known = router.coordinator.workers.current(worker.plan.name, worker.host.incarnation)
    if known is None or known.cache is None:
        return known is None or not router.coordinator.config.policy.hash_prompts
    has = set(worker.engine._pool.indexed())
    if (tiers := worker.host.tiers) is not None:
        for tier, is_readable in zip(tiers.stack.local, tiers.stack.readable_locals(), strict=True):
            has.update(tier.held() if is_readable else ())
    told = unpack_hashes(pack_hashes(has))
    return len(known.cache) == len(set(told)) and all(hash in known.cache for hash in told)
