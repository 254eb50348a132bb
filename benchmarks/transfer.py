"""Measures block transfer alone: two processes on this host, a pool each, one handoff at a time, by every transport
that workers have; beside a copy in memory and what moves the same bytes without Baton (`transfer_bare`).

In each round every way has its turn, so that what disturbs the machine meets all of them. A handoff is whole: from the
fetch that opens to the release that is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from baton.v1 import types_pb2
from benchmarks.figure import Figure, Findings, Series, ratio
from benchmarks.transfer_bare import BARE, BareTlsSocket, copy_in_memory
from benchmarks.transfer_source import TOKEN, RemoteSource, certificates_in, new_pool, site_of
from services.core.clock import MonotonicClock
from services.engine.model.kv_cache import KVCache
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kvtransfer.client import BlockFetcher, FetchOrder, FetchOutcome
from services.kvtransfer.peers import Peers
from services.rpc.certificates import Certificates
from services.rpc.status import from_call
from services.worker.machine import Machine
from services.worker.transfer import TRANSPORTS

_Samples = dict[str, list[float]]
_COPY = "a copy in memory"
_TLS, _BARE_TLS = "tcp in TLS", "a bare TLS socket"
CHECKED = ", blocks checked"
"""What follows the name of a transport whose blocks are checked, as they are by default."""
_CEILINGS = {"shm": _COPY, "tcp": "a bare socket", "grpc": "bare gRPC", "nixl": "bare NIXL", _TLS: _BARE_TLS}
"""What bounds each transport: the same bytes moved in the same way, without leases, streams and tables."""


def _layout(layers: int, heads: int, head_dim: int) -> Layout:
    return Layout("bench", "0", "0", "bfloat16", layers, heads, head_dim, block_size=16)


SMOLLM2 = _layout(30, 3, 64)
"""SmolLM2-135M in bfloat16: 23 KB a token, 2048 tokens are 128 blocks, 47 MB."""
BLOCKS = {16: _layout(2, 2, 64), 64: _layout(8, 2, 64), 360: SMOLLM2, 2048: _layout(32, 8, 128)}
"""Layouts by the KiB of a block; the largest is Llama 3 8B's."""
PROMPTS = (128, 512, 2048, 8192)
_PROMPT_BYTES = 128 * SMOLLM2.block_bytes


def measure(repeats: int) -> Findings:
    """Measures handoffs of 2048 tokens, then other prompt lengths and other block sizes, each as a line per way."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers have it
        return runner.run(_measure(repeats))


async def _measure(repeats: int) -> Findings:
    findings: Findings = []
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    by_block: dict[str, list[tuple[float, float]]] = {}
    for num_tokens in PROMPTS:
        samples, copying, processor = await _rounds(SMOLLM2, SMOLLM2.num_blocks(num_tokens), repeats)
        what = f"transfer: {num_tokens} tokens"
        findings += _figures(what, samples, copying)
        if num_tokens == PROMPTS[-1]:
            findings += [
                Figure(f"{what}, processor time of both ends, {name}", "s/GB", tuple(each))
                for name, each in processor.items()
            ]
        _add(by_prompt, num_tokens, samples)
    for kibibytes, layout in BLOCKS.items():
        samples, copying, _ = await _rounds(layout, _PROMPT_BYTES // layout.block_bytes, repeats)
        if layout is not SMOLLM2:
            findings += _figures(f"transfer: 47 MB in blocks of {kibibytes} KiB", samples, copying)
        _add(by_block, kibibytes, samples)
    for chart, lines in (("transfer_prompt", by_prompt), ("transfer_block", by_block)):
        findings += [Series(chart, name, tuple(points)) for name, points in lines.items()]
    return findings


def _add(lines: dict[str, list[tuple[float, float]]], x: float, samples: dict[str, list[float]]) -> None:
    for name, each in samples.items():
        lines.setdefault(name, []).append((x, Figure(name, "GB/s", tuple(each)).median))


def _figures(what: str, samples: dict[str, list[float]], copying: dict[str, list[float]]) -> Findings:
    found: Findings = [Figure(f"{what}, {name}", "GB/s", tuple(each)) for name, each in samples.items()]
    for name in (*TRANSPORTS, _TLS):
        ceiling = _CEILINGS.get(name, _COPY)
        if name in samples and ceiling in samples:
            found.append(ratio(f"  {name}, of {ceiling}", samples[name], samples[ceiling]))
            found.append(ratio(f"  {name} while it copies, of {ceiling}", copying[name], samples[ceiling]))
        if (checked := name + CHECKED) in samples:
            found.append(ratio(f"  {checked}, of {name}", samples[checked], samples[name]))
    found.append(ratio(f"  {_TLS}, of tcp", samples[_TLS], samples["tcp"]))
    return found


async def _rounds(layout: Layout, num_blocks: int, repeats: int) -> tuple[_Samples, _Samples, _Samples]:
    """Returns the GB/s of each way, round by round after one that warms up; those of the copies alone; and the seconds
    of processor time per GB, of both ends."""
    num_bytes = num_blocks * layout.block_bytes
    samples: dict[str, list[float]] = {}
    copying: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        certified = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certificates = certificates_in(certified)
        assert certificates is not None
        source = await stack.enter_async_context(RemoteSource(layout, num_blocks))
        secure_source = await stack.enter_async_context(RemoteSource(layout, num_blocks, certified))
        pool, other = new_pool(layout, num_blocks), new_pool(layout, num_blocks)
        destination = Destination(layout, pool, source)
        secure = Destination(layout, pool, secure_source, certificates)
        ways: dict[str, Callable[[], Coroutine[Any, Any, float | None]]] = {
            _COPY: lambda: asyncio.to_thread(copy_in_memory, other, pool)
        }
        bares = [await make(source, pool) for make in BARE.values()]
        bare_tls = BareTlsSocket(secure_source.bare.socket_port, pool, certificates.peer_context())
        ways |= {name: bare.move for name, bare in zip(BARE, bares, strict=True) if bare is not None}
        ways |= {name: lambda name=name: destination.hand_over(name) for name in destination.transports}  # type: ignore[misc]
        ways |= {_BARE_TLS: bare_tls.move, _TLS: lambda: secure.hand_over("tcp")}
        for number in range(repeats + 1):
            for name, move in ways.items():
                await destination.prepare()
                await secure.prepare()
                used_s = _processor_s(source, secure_source)
                begun_s = time.perf_counter()
                copy_s = await move()
                seconds = time.perf_counter() - begun_s
                used_s = _processor_s(source, secure_source) - used_s
                if number:
                    processor.setdefault(name, []).append(used_s / (num_bytes / 1e9))
                    samples.setdefault(name, []).append(num_bytes / seconds / 1e9)
                    if copy_s is not None:
                        copying.setdefault(name, []).append(num_bytes / copy_s / 1e9)
        for bare in (*bares, bare_tls):
            if bare is not None:
                await bare.close()
        await destination.close()
        await secure.close()
        other.close()
        pool.close()
    return samples, copying, processor


def _processor_s(*sources: RemoteSource) -> float:
    return time.process_time() + sum(source.processor_s() for source in sources)


class Destination:
    def __init__(
        self, layout: Layout, pool: KVCache, source: RemoteSource, certificates: Certificates | None = None
    ) -> None:
        self._source = source
        self._machine = Machine(TOKEN, certificates=certificates)
        self._clock = MonotonicClock()
        self._imports = ImportTable(on_freed=lambda import_: None)
        offered = {offer.transport for offer in source.where.offers}
        site = site_of(pool, self._machine)
        self._peers = Peers(self._machine.dial, from_call)
        self._fetchers: dict[str, BlockFetcher] = {}
        for (name, (_, destination_end)), checks in itertools.product(TRANSPORTS.items(), (False, True)):
            if types_pb2.Transport.Value(f"TRANSPORT_{name.upper()}") in offered:
                self._fetchers[name + CHECKED * checks] = BlockFetcher(
                    pool,
                    layout,
                    self._imports,
                    self._clock,
                    transports=[destination_end(site)],
                    peers=self._peers,
                    checksums=checks,
                )
        self._blocks = tuple(range(pool.num_blocks))
        self._leg = 0
        self._lease_id: bytes | None = None

    @property
    def transports(self) -> list[str]:
        return list(self._fetchers)

    async def prepare(self) -> None:
        """Has a lease of all blocks opened and sealed, unless the last one was not fetched."""
        if self._lease_id is None:
            self._lease_id = await self._source.next_lease()

    async def hand_over(self, transport: str) -> float | None:
        """Fetches the lease; returns how long copies were under way."""
        self._leg += 1
        lease_id, self._lease_id = self._lease_id, None
        assert lease_id is not None
        import_ = self._imports.reserve(self._blocks, self._clock.now())
        order = FetchOrder(self._source.where, lease_id, self._leg, import_, 0, self._blocks)
        outcome: FetchOutcome = await self._fetchers[transport].fetch(order)
        assert outcome.num_blocks == len(self._blocks)
        return outcome.copy_s

    async def close(self) -> None:
        for fetcher in self._fetchers.values():
            await fetcher.close()
        await self._peers.close()
        self._imports = ImportTable(on_freed=lambda import_: None)
