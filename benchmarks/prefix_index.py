"""Measures what it costs to look at prefix caches: the time that they add to a choice of a worker, and their memory.

`python -m benchmarks.prefix_index [--workers 100] [--blocks 1000,100000] [--prompt 32768]`. Every worker has told of as
many blocks, among them those of a quarter of the prompts to a depth that is drawn for each worker and prompt. Hashing
the prompt is not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure, Findings
from benchmarks.result import Result
from services.core.hashing import PromptHashes
from services.router.policy import (
    PRESETS,
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    Load,
    PrefixIndex,
    Role,
    WorkerView,
)
from services.router.policy.cluster import place_prefill
from services.router.policy.known_cache import KnownCache

_BLOCK = 16
_NUM_PROMPTS = 200
_ROUNDS = 5


def measure(num_workers: int, num_blocks: int, prompt_tokens: int) -> Findings:
    chance = random.Random(1)
    hashes = [PromptHashes(_hashes(chance, prompt_tokens // _BLOCK)) for _ in range(_NUM_PROMPTS)]
    index = PrefixIndex()
    caches = [KnownCache(num_blocks, 0.0, index) for _ in range(num_workers)]
    telling: list[float] = []
    for cache in caches:
        starts = [prompt[: chance.randint(0, len(prompt))] for prompt in chance.sample(hashes, _NUM_PROMPTS // 4)]
        stored = [hash for start in starts for hash in start][:num_blocks]
        told = _received(stored + _hashes(chance, num_blocks - len(stored)))
        began_s = time.thread_time()
        cache.tell(whole=True, stored=told, removed=())
        telling.append((time.thread_time() - began_s) * 1000)
    num_bytes = max(_bytes(cache) for cache in caches) + _index_bytes(index) / sum(map(len, caches))
    known, unknown = _cluster(caches), _cluster([None] * num_workers)
    found: Findings = [Figure("memory of a block, for each worker that has it", "bytes", (num_bytes,), "<= 100")]
    found.append(Figure("taking over all that a worker tells at once", "ms", tuple(telling)))
    jobs = [Job(prompt_tokens, prompt_tokens + 128, block_hashes={_BLOCK: prompt}) for prompt in hashes]
    with_caches = [_times(lambda job: _place(job, known), jobs) for _ in range(_ROUNDS)]
    without = [_times(lambda job: _place(job, unknown), jobs) for _ in range(_ROUNDS)]
    what = f"{num_workers} workers, {num_blocks} blocks each, a prompt of {prompt_tokens} tokens"
    expected = [_times(lambda job: caches[0].expect(job.block_hashes[_BLOCK], ""), jobs[:20]) for _ in range(_ROUNDS)]
    noting = statistics.median(sample for times in expected for sample in times)
    found.append(Figure("noting what a worker was given", "ms", (noting,)))
    found.append(Figure(f"a choice without caches: {what}", "ms", tuple(map(statistics.median, without))))
    for name, percent, target in (("p50", 50, "<= 0.15"), ("p99", 99, "<= 0.5")):
        added = tuple(
            _percentile(one, percent) - _percentile(other, percent) + noting
            for one, other in zip(with_caches, without, strict=True)
        )
        found.append(Figure(f"  {name} that caches add, noting of the prompt included", "ms", added, target))
    return found


def _hashes(chance: random.Random, count: int) -> list[int]:
    return [chance.getrandbits(64) for _ in range(count)]


def _received(hashes: list[int]) -> tuple[int, ...]:
    """Returns equal hashes that are objects of their own, as those that a worker tells are."""
    return struct.unpack(f"<{len(hashes)}Q", struct.pack(f"<{len(hashes)}Q", *hashes))


def _bytes(cache: KnownCache) -> float:
    """Returns the bytes of a block in the worker's own memory, the number itself included."""
    return sys.getsizeof(cache._told) / len(cache) + sys.getsizeof(1 << 63)


def _index_bytes(index: PrefixIndex) -> int:
    """Returns the bytes that the index takes beside workers' own memories, with whose numbers it shares its own."""
    holders = index._holders
    return sys.getsizeof(holders) + sum(map(sys.getsizeof, holders.values()))


def _place(job: Job, cluster: Cluster) -> None:
    assert place_prefill(job, cluster.everyone, HandoffsInFlight(), 0.0, PRESETS["prefix_aware"]) is not None


def _times(act: Callable[[Job], None], jobs: list[Job]) -> list[float]:
    """Returns the milliseconds of the processor that it took for each job."""
    samples = []
    for job in jobs:
        began_s = time.thread_time()
        act(job)
        samples.append((time.thread_time() - began_s) * 1000)
    return samples


def _percentile(samples: list[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1]


def _cluster(caches: list[KnownCache | None] | list[KnownCache]) -> Cluster:
    return Cluster(
        WorkerView(
            worker_id=f"w{number}",
            model="",
            roles=Role.MIXED,
            ready=True,
            host_id="",
            fingerprint=Fingerprint("kv", "float32"),
            block_size=_BLOCK,
            num_blocks=1 << 20,
            max_model_len=1 << 20,
            max_num_seqs=256,
            load=Load(1, blocks_free=1 << 20),
            cache=cache,
        )
        for number, cache in enumerate(caches)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_index", description=__doc__)
    parser.add_argument("--workers", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--blocks", default="1000,100000", help="that each has told of (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=32_768, help="its tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/prefix-index.json"), help="the result file")
    arguments = parser.parse_args()
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    for num_blocks in map(int, arguments.blocks.split(",")):
        result.add(measure(arguments.workers, num_blocks, arguments.prompt))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
