"""Defines a store's configuration: the flags that every worker has for its peers, and how much it keeps of what."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.config import option
from services.core.sizes import A_SIZE, is_size
from services.worker.config import PeerConfig
from services.worker.tier_config import LowerTierConfig


@dataclass(frozen=True)
class StoreMemory:
    """Keeps the flag that says how much a store keeps. `baton up` has the same."""

    kvtransfer_bytes: str = option(
        "4GiB",
        "host memory of a store for KV, such as 4GiB; it is taken as it is first used",
        check=is_size,
        must=A_SIZE,
    )


@dataclass(frozen=True)
class KeepConfig(StoreMemory):
    """Keeps what only a store has. No name means another thing to a worker, since both may have one environment."""

    served_model_name: str = option(
        "", "served model whose KV is kept (default: that of the first worker its routers know)"
    )


@dataclass(frozen=True)
class StoreConfig(PeerConfig, LowerTierConfig, KeepConfig):
    """Keeps the configuration of a store."""
