"""Makes the tiers that a worker's flags ask for."""

from __future__ import annotations

import logging
import os
import re

from services.core.errors import ConfigError
from services.core.sizes import parse_size
from services.kv.layout import Layout
from services.kvtransfer.tiers.disk import DiskTier, slot_bytes_for
from services.kvtransfer.tiers.host import HostTier
from services.kvtransfer.tiers.slot_file import DirectFile
from services.kvtransfer.tiers.tier import Tier
from services.worker.tier_config import LowerTierConfig, TierConfig

log = logging.getLogger(__name__)

_REDIS = ("redis", "rediss", "unix")
"""Schemes of URLs of a Redis-compatible server: plain, with TLS, and by a Unix socket."""
_S3 = "s3"


def tiers_of(config: LowerTierConfig, layout: Layout, worker_id: str) -> list[Tier]:
    """Returns the tiers that the flags ask for, the fastest first. Raises ConfigError."""
    tiers: list[Tier] = []
    if isinstance(config, TierConfig) and config.kv_host_bytes:
        num_bytes = parse_size(config.kv_host_bytes)
        _demand_room(num_bytes, layout.block_bytes, "--kv-host-bytes")
        try:
            tiers.append(HostTier(layout.block_bytes, num_bytes))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--kv-host-bytes: there is no such memory: {error}") from error
    if config.kv_disk and (disk := _disk_tier(config, layout, worker_id)) is not None:
        tiers.append(disk)
    if config.kv_backend:
        tiers.append(_backend(config.kv_backend, layout))
    return tiers


def _backend(url: str, layout: Layout) -> Tier:
    """Returns the tier that the URL names."""
    scheme = url.partition("://")[0]
    if scheme not in (*_REDIS, _S3):  # it is not repeated, since it may be a password
        raise ConfigError(f"--kv-backend: is no URL with one of the schemes {', '.join((*_REDIS, _S3))}")
    try:  # each only with its extra
        if scheme == _S3:
            from services.kvtransfer.tiers.s3_tier import S3Tier

            return S3Tier(url, layout.fingerprint, layout.block_bytes)
        from services.kvtransfer.tiers.redis_tier import RedisTier

        return RedisTier(url, layout.fingerprint, layout.block_bytes)
    except ImportError as error:
        extra = _S3 if scheme == _S3 else "redis"
        raise ConfigError(f"--kv-backend: needs the extra: pip install 'baton-serving[{extra}]'") from error


def _disk_tier(config: LowerTierConfig, layout: Layout, worker_id: str) -> DiskTier | None:
    """Returns the disk tier; None if another process has its file."""
    num_bytes, slot_bytes = parse_size(config.kv_disk_bytes), slot_bytes_for(layout.block_bytes)
    _demand_room(num_bytes, slot_bytes, "--kv-disk-bytes")
    path = os.path.join(config.kv_disk, f"{worker_id}-{layout.fingerprint}.kv")
    try:
        os.makedirs(config.kv_disk, mode=0o700, exist_ok=True)
        file = DirectFile(path, slot_bytes)
    except BlockingIOError:
        log.warning("%s is in use by another process: this worker has no disk tier", path)
        return None
    except OSError as error:
        raise ConfigError(f"--kv-disk: {error}") from error
    _remove_others(config.kv_disk, worker_id, layout.fingerprint)
    return DiskTier(file, layout.fingerprint, layout.block_bytes, num_bytes)


def _demand_room(num_bytes: int, slot_bytes: int, flag: str) -> None:
    if num_bytes < slot_bytes:
        raise ConfigError(f"{flag}: {num_bytes} bytes hold no block, which takes {slot_bytes}")


def _remove_others(folder: str, worker_id: str, fingerprint: str) -> None:
    """Removes the files of this worker with other layouts: nothing can use them any more, and nobody else would remove
    them."""
    own = re.compile(rf"{re.escape(worker_id)}-([0-9a-f]{{32}})\.kv")
    for name in os.listdir(folder):
        if (found := own.fullmatch(name)) and found[1] != fingerprint:
            try:
                os.unlink(os.path.join(folder, name))
            except OSError as error:
                log.warning("%s is of no use any more, and cannot be removed: %s", name, error)
            else:
                log.info("removed %s: it is of another model, or of other weights", name)
