"""Makes a worker's KV endpoint: its transports, as the configuration and the machine allow them, over its pool.

Owns: which transports there are, the pool's layout, and which ways of KV from one host to another do not encrypt it,
which a worker that has TLS takes only with `--allow-plain-kv`. Never: how a transport works
(`services.kvtransfer.transports`), or what an endpoint does with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from urllib.parse import urlsplit

from services.core.addresses import is_loopback, parse
from services.core.errors import ConfigError
from services.core.hashing import BlockHash
from services.engine.config import EngineInfo
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.regions import BlockMemory, check_regions
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.endpoint import KVEndpoint
from services.kvtransfer.transports import DestinationEnd, SourceEnd, TransportUnavailable
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.nixl import NixlDestination, NixlSource
from services.kvtransfer.transports.nixl_agent import has_rdma_device, is_installed, ucx_settings
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, num_slots_for
from services.kvtransfer.transports.tcp_source import TcpSource
from services.worker.config import PeerConfig
from services.worker.machine import Machine
from services.worker.tier_config import LowerTierConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Site:
    """Has what the ends of a worker's transports may need of it."""

    config: PeerConfig
    memory: BlockMemory
    machine: Machine
    board: LeaseBoard
    reader: Executor
    """The thread on which the pool is read."""
    worker_id: str
    incarnation: int


def _shm_source(site: Site) -> ShmSource:
    cache, config, machine = site.memory, site.config, site.machine
    area = None
    if cache.fd is None:
        num_slots = num_slots_for(cache, config.staging_mb << 20)
        area = machine.staging_area(num_slots, cache.block_bytes, cache.region(0).device)
    if (area or cache).fd is None:
        # Peers would have to trust this process not to truncate what they have mapped.
        if area is not None:
            area.close()
        raise TransportUnavailable("needs memory that can be sealed, and this kernel cannot seal it (Linux 5.1)")
    staging = Staging(cache, area, site.board, machine.awake) if area is not None else None
    path = os.path.join(config.shm_dir, f"{site.worker_id}.sock") if config.shm_dir else None
    return ShmSource(cache, machine.share(area or cache, site.incarnation, path), site.reader, staging=staging)


def _tcp_source(site: Site) -> TcpSource:
    config = site.config
    advertised_host = parse(config.advertise)[0] if config.advertise else ""
    return site.machine.serve_blocks(
        site.memory,
        site.reader,
        site.incarnation,
        host=config.host,
        port=config.kv_port,
        advertised_host=advertised_host,
    )


def _nixl_source(site: Site) -> NixlSource:
    return site.machine.register_blocks(site.memory, site.reader, site.incarnation, ucx=_ucx(site))


def _nixl_destination(site: Site) -> NixlDestination:
    return site.machine.read_registered(site.memory, ucx=_ucx(site))


def _ucx(site: Site) -> dict[str, str]:
    return ucx_settings(on_this_host=is_loopback(site.config.host), asked_for=site.config.transport == "nixl")


def _nixl_helps(site: Site) -> bool:
    """Returns whether NIXL can have a better way than the other transports, and is not only installed."""
    reaches_further = has_rdma_device() and not is_loopback(site.config.host)
    return is_installed() and (reaches_further or site.memory.region(0).device != "cpu")


TRANSPORTS: dict[str, tuple[Callable[[Site], SourceEnd], Callable[[Site], DestinationEnd]]] = {
    "shm": (_shm_source, lambda site: site.machine.mappings(site.memory.block_bytes)),
    "nixl": (_nixl_source, _nixl_destination),
    "tcp": (_tcp_source, lambda site: site.machine.read_blocks()),
    "grpc": (
        lambda site: GrpcSource(site.memory, site.reader),
        lambda site: GrpcDestination(site.memory.block_bytes),
    ),
}
"""The makers of the source's end and the destination's, by the transports' names in `--transport`, the best first."""
_OFFERED_ALWAYS = "grpc"
"""This transport needs nothing but the connection, so a worker offers it even if it pulls by another."""


def endpoint_of(
    site: Site,
    info: EngineInfo,
    imports: ImportTable,
    *,
    lend: Callable[[Sequence[BlockHash]], list[int]],
    give_back: Callable[[Sequence[int]], None],
) -> KVEndpoint:
    """Returns the endpoint of the worker's pool, which `info` describes. `lend` and `give_back` are those of `Lender`.

    Raises ConfigError if the transport that was asked for cannot be had.
    """
    config, machine, layout = site.config, site.machine, _layout(info)
    demand_encryption(config, has_tls=machine.certificates is not None)
    check_regions(site.memory, layout.block_bytes)
    if reason := withheld(site):
        log.warning("KV is not moved by %s", reason)
    return KVEndpoint(
        site.memory,
        layout,
        site.board,
        imports,
        incarnation=site.incarnation,
        clock=machine.clock,
        awake=machine.awake,
        sources=list(_offered(site)),
        destinations=[TRANSPORTS[name][1](site) for name in _pulled(site)],
        dial=machine.dial,
        lend=lend,
        give_back=give_back,
        reader=site.reader,
        checksums=checks_blocks(site),
        copy_threads=machine.threads("kv-copy"),
    )


def withheld(site: Site) -> str:
    """Returns what would help to move KV and is not taken, and why, in words for people; "" if there is nothing."""
    return f"nixl: {UNENCRYPTED}" if _nixl_is_withheld(site) else ""


def _pulled(site: Site) -> list[str]:
    """Returns the names of the transports that this worker pulls by."""
    if site.config.transport != "auto":
        return [site.config.transport]
    has_nixl = _nixl_helps(site) and not _nixl_is_withheld(site)
    return [name for name in TRANSPORTS if name != "nixl" or has_nixl]


def _nixl_is_withheld(site: Site) -> bool:
    has_tls = site.machine.certificates is not None
    return site.config.transport == "auto" and _nixl_helps(site) and must_encrypt(site.config, has_tls=has_tls)


def _offered(site: Site) -> Iterator[SourceEnd]:
    wanted, pulled = site.config.transport, _pulled(site)
    for name, (source_end, _) in TRANSPORTS.items():
        if name not in pulled and name != _OFFERED_ALWAYS:
            continue
        try:
            yield source_end(site)
        except TransportUnavailable as error:
            if wanted == name:
                raise ConfigError(f"--transport: {name} {error}") from error
            log.warning("%s is not offered to other workers: it %s", name, error)


def checks_blocks(site: Site) -> bool:
    """Returns whether blocks that are fetched are checked; `auto` spares those of a device the copy that it takes."""
    in_host_memory = site.memory.region(0).device == "cpu"
    return site.config.checksums == "always" or (site.config.checksums == "auto" and in_host_memory)


def _layout(info: EngineInfo) -> Layout:
    return Layout(
        model_id=info.model_id,
        weights_digest=info.weights_digest,
        config_digest=info.config_digest,
        dtype=info.dtype,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=info.block_size,
        engine=info.engine,
    )


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
