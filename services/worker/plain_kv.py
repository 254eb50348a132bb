"""Tells which ways of KV from one host to another do not encrypt it, and refuses them to a worker that has TLS.

Owns: which ways those are, and what `--allow-plain-kv` allows. Never: how KV moves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from services.core.addresses import is_loopback
from services.core.errors import ConfigError
from services.worker.config import PeerConfig
from services.worker.tier_config import LowerTierConfig

_ADVICE = "allow KV in clear by --allow-plain-kv"
UNENCRYPTED = f"it does not encrypt, and this worker has TLS ({_ADVICE})"
"""Why NIXL is not taken. Shared memory stays on its host, and the other transports go inside TLS."""


def must_encrypt(config: PeerConfig, *, has_tls: bool) -> bool:
    """Returns whether KV may leave this host inside TLS alone."""
    return has_tls and not config.allow_plain_kv


def demand_encryption(config: PeerConfig, *, has_tls: bool, environ: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError if a worker that must encrypt KV is told to move it in the clear."""
    if not must_encrypt(config, has_tls=has_tls):
        return
    if config.transport == "nixl":
        raise ConfigError(f"--transport: nixl: {UNENCRYPTED}")
    backend = config.kv_backend if isinstance(config, LowerTierConfig) else ""
    if crosses_in_clear(backend, os.environ if environ is None else environ):  # its URL may have a password
        raise ConfigError(
            f"--kv-backend: KV would cross the network in the clear, and this worker has TLS: take rediss:// in place "
            f"of redis://, and an endpoint of https://, or {_ADVICE}"
        )


def crosses_in_clear(backend: str, environ: Mapping[str, str]) -> bool:
    """Returns whether what goes to the server of the backend's URL crosses a network without TLS."""
    scheme = backend.partition("://")[0]
    if scheme == "redis":
        return not _is_here(backend)
    endpoints = [value for name, value in environ.items() if name.upper().startswith("AWS_ENDPOINT")]
    return scheme == "s3" and any(each.lower().startswith("http://") and not _is_here(each) for each in endpoints)


def _is_here(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # no URL
        return False
