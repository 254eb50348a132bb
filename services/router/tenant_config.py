"""Defines the flags about tenants and about the files that say what requests used. `baton up` has the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.core.config import option

MOST_TEXT_CHARS = 65_536


def _bytes_option(of: str) -> Any:
    return option(
        64 << 20,
        f"size at which another file of the {of} log begins, bytes; the one before is FILE.1",
        check=lambda v: v >= 4096,
        must="must be at least 4096",
    )


def _files_option(of: str, default: int) -> Any:
    return option(
        default,
        f"files of the {of} log, beyond which the oldest is deleted",
        check=lambda v: 2 <= v <= 10_000,
        must="must be in [2, 10000]",
    )


@dataclass(frozen=True)
class TenantConfig:
    """Keeps the flags."""

    tenants: str = option(
        "",
        "YAML file with the tenants: their keys, limits and models; read again on SIGHUP and when it changes (default: "
        "none, and nobody is asked for a key)",
    )
    routers: int = option(
        0,
        "routers that share the workers, by which each tenant's limits are divided; 0: as many as the workers say",
        check=lambda v: 0 <= v <= 64,
        must="must be in [0, 64]",
    )
    tenants_store: str = option(
        "",
        "Redis-compatible server in which routers share the limits of tenants, such as redis://HOST:6379/0; needs the "
        "extra redis (default: none, and each router takes its part of the limits)",
    )
    usage_log: str = option(
        "",
        "append a JSON line for each request that ended to this file: tenant, tokens and cost, for baton usage and to "
        "bill by (default: none)",
    )
    usage_log_bytes: int = _bytes_option("usage")
    usage_log_files: int = _files_option("usage", 64)
    request_log: str = option(
        "",
        "append a JSON line for each request that ended to this file: tenant, tokens, times, workers and outcome "
        "(default: none)",
    )
    request_log_bytes: int = _bytes_option("request")
    request_log_files: int = _files_option("request", 8)
    request_log_text_chars: int = option(
        0,
        "characters of each prompt, and of each answer, that the request log has, of tenants that allow it; 0: none",
        check=lambda v: 0 <= v <= MOST_TEXT_CHARS,
        must=f"must be in [0, {MOST_TEXT_CHARS}]",
    )
