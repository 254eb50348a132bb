"""Replays a trace through a pool of blocks under each order of eviction: which finds most of the prompts' blocks there?

`python -m benchmarks.eviction --trace mooncake.jsonl [--scans azure.csv] [--share 0.02,0.1,0.4]`. The trace says which
blocks prompts share. `--scans` adds as many prompts as it has that nobody shares, of another trace's lengths: they can
only evict. A pool has a share of all the blocks that the trace names. Nothing is computed or timed.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from benchmarks.tiny_lfu import TinyLfu
from services.core.hashing import BlockHash, block_hash, root_hash
from services.kv.eviction import EvictionOrder, LeastRecentlyUsed
from services.kv.pool import BlockPool, Holder
from services.kv.s3_fifo import S3Fifo

ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "LRU": lambda capacity: LeastRecentlyUsed(),
    "S3-FIFO": lambda capacity: S3Fifo(),
    "W-TinyLFU": TinyLfu,
}
BLOCK_TOKENS = 512
"""Of the blocks that Mooncake's trace names."""
Prompt = tuple[float, list[BlockHash], bool]
"""When it came, in seconds; its blocks; and whether it is a scan."""


def shared_prompts(path: Path) -> Iterator[Prompt]:
    """Yields the prompts of Mooncake's trace."""
    for line in path.read_text().splitlines():
        request = json.loads(line)
        yield request["timestamp"] / 1000, _chain([f"shared {number}" for number in request["hash_ids"]]), False


def scans(path: Path) -> Iterator[Prompt]:
    """Yields a prompt of its own for each request of Azure's trace."""
    start: datetime | None = None
    with path.open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or at
            num_blocks = -(-int(row["ContextTokens"]) // BLOCK_TOKENS)
            names = [f"scan {number} {place}" for place in range(num_blocks)]
            yield (at - start).total_seconds(), _chain(names), True


def _chain(names: Sequence[str]) -> list[BlockHash]:
    hashes, parent = [], root_hash()
    for name in names:
        parent = block_hash(parent, list(name.encode()))
        hashes.append(parent)
    return hashes


def hit_rate(prompts: Sequence[Prompt], num_blocks: int, order: EvictionOrder) -> float:
    """Returns the share of the blocks of prompts that are no scans that were found in the pool."""
    pool = BlockPool(num_blocks, BLOCK_TOKENS, order=order)
    num_asked = num_found = 0
    for _, hashes, is_scan in prompts:
        hashes = hashes[:num_blocks]
        found = pool.match_prefix(hashes)
        pool.acquire(found, Holder.SEQUENCE)
        fresh = pool.allocate(len(hashes) - len(found), Holder.SEQUENCE)
        for block_id, hash in zip(fresh, hashes[len(found) :], strict=True):
            pool.index(block_id, hash)
        pool.release([*found, *fresh], Holder.SEQUENCE)
        if not is_scan:
            num_asked += len(hashes)
            num_found += len(found)
    pool.check()
    return num_found / num_asked


def measure(prompts: Sequence[Prompt], shares: Sequence[float], about: str) -> Findings:
    num_shared = len({hash for _, hashes, is_scan in prompts for hash in hashes if not is_scan})
    found: Findings = []
    for share in (*shares, 1.0):
        num_blocks = max(1, round(share * num_shared))
        for name, new_order in ORDERS.items():
            rate = hit_rate(prompts, num_blocks, new_order(num_blocks))
            found.append(Figure(f"{about}, {num_blocks} blocks ({share:.0%}), {name}: found", "%", (100 * rate,)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.eviction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's JSON lines")
    parser.add_argument("--scans", type=Path, help="Azure's CSV: its requests as prompts that nobody shares")
    parser.add_argument("--share", default="0.02,0.05,0.1,0.2,0.4", help="pool sizes, as shares of all blocks")
    parser.add_argument("--json", type=Path, default=Path("out/eviction.json"), help="the result file")
    arguments = parser.parse_args()
    shares = [float(share) for share in arguments.share.split(",")]
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    # Of a file only its name: where it lies on this machine is of no use elsewhere.
    result = Result({name: value.name if isinstance(value, Path) else str(value) for name, value in settings.items()})
    prompts = list(shared_prompts(arguments.trace))
    result.add(measure(prompts, shares, "alone"))
    if arguments.scans:
        among = list(heapq.merge(prompts, scans(arguments.scans), key=lambda prompt: prompt[0]))
        until = prompts[-1][0]
        result.add(measure([prompt for prompt in among if prompt[0] <= until], shares, "among scans"))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
