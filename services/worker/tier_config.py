"""Defines the flags for memory below the pool. Nothing here imports a tier: `baton up` has the same flags."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.config import option
from services.core.sizes import A_SIZE, is_size


def _is_size_or_none(text: str) -> bool:
    return not text or is_size(text)


@dataclass(frozen=True)
class LowerTierConfig:
    """Keeps the flags of the tiers that a store can have too; without any, there are none."""

    kv_disk: str = option("", "folder on a local disk for a file of KV that leaves the pool (default: none)")
    kv_disk_bytes: str = option(
        "64GiB", "size of that file at most; it grows as it is used", check=is_size, must=A_SIZE
    )
    kv_backend: str = option(
        "",
        "where KV is kept for all workers of a model: a Redis-compatible server, such as redis://HOST:6379/0, or "
        "object storage, s3://BUCKET/PREFIX; needs the extra redis or s3 (default: none)",
    )


@dataclass(frozen=True)
class TierConfig(LowerTierConfig):
    """Keeps the flags of all tiers of a worker that computes."""

    kv_host_bytes: str = option(
        "",
        "host memory for KV that leaves the pool, such as 8GiB; it helps where the pool is on a GPU (default: none)",
        check=_is_size_or_none,
        must=A_SIZE,
    )
