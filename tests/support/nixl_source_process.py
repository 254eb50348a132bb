"""Runs a source that offers NIXL in a process of its own, which can be killed, stopped and told to close.

It prints one line of JSON for each lease that a line of its standard input asks for: the source and the lease's id, in
hexadecimal digits. The word `close` ends its NIXL agent in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baton.v1 import types_pb2
from tests.support.kv_harness import LAYOUT, Source, running

BIG = replace(LAYOUT, num_layers=32, num_kv_heads=8, head_dim=64)
"""A layout whose blocks have 2 MiB: a lease of many takes a while."""


@dataclass(frozen=True)
class Offered:
    """Is a sealed lease of the process's."""

    where: types_pb2.KVSource
    lease_id: bytes
    num_blocks: int
    first_seed: int


class SourceProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._num_leases = 0

    async def lease(self, num_blocks: int) -> Offered:
        self._say(str(num_blocks))
        answer = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        self._num_leases += 1
        where = types_pb2.KVSource.FromString(bytes.fromhex(answer["where"]))
        return Offered(where, bytes.fromhex(answer["lease"]), num_blocks, 100 * self._num_leases)

    def close_agent(self) -> None:
        """Returns when the agent has ended."""
        self._say("close")
        assert self._process.stdout.readline() == "closed\n"

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _say(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


@contextmanager
def source_process(tls: str) -> Iterator[SourceProcess]:
    """Starts a source whose UCX has the transports `tls`."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "UCX_TLS": tls},
    )
    source = SourceProcess(process)
    try:
        yield source
    finally:
        source.end()
        process.stdin.close()
        process.stdout.close()


async def main() -> None:
    source = Source(BIG, shared=False)
    async with running(source):
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "close":
                source.nixl.close()
                print("closed", flush=True)
                continue
            lease = source.lease(int(line) * BIG.block_size, sealed=True)
            where = source.where
            where.ClearField("offers")
            where.offers.append(source.nixl.offer())
            said = {"where": where.SerializeToString().hex(), "lease": lease.lease_id.hex()}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
