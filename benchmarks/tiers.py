"""Measures what tiers are worth: conversations that need three times the pool go on, with each tier and with none.

A real `baton up` takes each conversation's first turn, and then each one's second, so that all have left the pool
before they come back. In a round each tier is measured once, one after another, on a cluster of its own. A backend is
measured where Redis' server, or Valkey's, is on PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.cluster import cluster, make_request, request_of
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.settings import setting
from services.core.hashing import block_hashes
from services.kvtransfer.tiers.disk import DiskTier, slot_bytes_for
from services.kvtransfer.tiers.slot_file import DirectFile, page_aligned
from services.kvtransfer.transports.staging import StagingArea

_BLOCK_TOKENS = 16
_POOL_OF_CONVERSATION = 4
"""The pool has room for so many conversations: at most a quarter of it is brought at once."""
_TIMES_THE_POOL = 3
_NEW_TOKENS = 32
"""Of a conversation's second turn."""
_BLOCK_BYTES = 360 * 1024
"""Of the default model's blocks in 16 bits."""
_NUM_READ = 128
_ANSWER_TOKENS = 16
"""Of a conversation's first turn."""
_VARIABLES = ("BATON_KV_HOST_BYTES", "BATON_KV_DISK", "BATON_KV_DISK_BYTES", "BATON_KV_BACKEND")
_REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
PARTS = ("disk", "conversations", "staged")
"""A disk tier against the disk; conversations at a mixed worker; the same at a pair whose pools cannot be mapped."""


@dataclass(frozen=True)
class TierSettings:
    conversation_tokens: int = setting(2048, "tokens of a conversation's first turn")
    tiers_parts: str = setting(",".join(PARTS), f"what is measured: some of {', '.join(PARTS)}, with commas")


@dataclass(frozen=True)
class _Cluster:
    """Says what a part's clusters are, and which tiers each is measured with."""

    words: str
    flags: tuple[str, ...]
    tiers: tuple[str, ...]
    module: str = "services.cli.main"


_STAGED = "benchmarks.staged"
_CLUSTERS = {
    "conversations": _Cluster("", ("--mixed", "1"), ("none", "host", "disk", "redis")),
    # Prompts are handed over, and through staging slots; the blocks of a GPU's pool reach its host tier as these do.
    "staged": _Cluster(
        "pools as on a GPU, ", ("--prefill", "1", "--decode", "1"), ("none", "host"), "benchmarks.staged"
    ),
}


@dataclass(frozen=True)
class _Turns:
    """Holds what came of all turns of one cluster."""

    token_ms: float
    """Between two tokens of a first turn's answer, while blocks are copied to the tiers: the mean."""
    ttft_ms: float
    """Of the second turns: the mean."""
    hit_rate: float
    """Share of the tokens of the first turns that were not computed again, in %."""


def measure(model: str, precision: Precision, repeats: int, settings: TierSettings) -> Findings:
    parts = settings.tiers_parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--tiers-parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    figures = disk_rates(repeats) if "disk" in parts else []
    for part in parts:
        if part in _CLUSTERS:
            figures += _conversations(_CLUSTERS[part], model, precision, repeats, settings.conversation_tokens)
    return figures


def _conversations(how: _Cluster, model: str, precision: Precision, repeats: int, tokens: int) -> Findings:
    tiers = [name for name in how.tiers if name != "redis" or _REDIS is not None]
    if len(tiers) < len(how.tiers):
        print("no redis-server or valkey-server is on PATH: a backend is not measured")
    found: dict[str, list[_Turns]] = {name: [] for name in tiers}
    for seed in range(repeats):
        for name, turns in found.items():
            with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=".") as folder, _tier(name, Path(folder)):
                turns.append(_turns(how, model, precision, tokens, seed))
    figures: Findings = []
    for name, turns in found.items():
        what = f"{how.words}conversations of {tokens} tokens at {_TIMES_THE_POOL} x the pool, tier {name}"
        figures.append(Figure(f"{what}: first token", "ms", tuple(each.ttft_ms for each in turns)))
        figures.append(Figure("  found, of the first turns' tokens", "%", tuple(each.hit_rate for each in turns)))
        figures.append(Figure("  between tokens of first turns", "ms", tuple(each.token_ms for each in turns)))
    without = found.pop("none")
    for name, turns in found.items():
        what, target = f"{how.words}first token, computed over read from {name}", "" if name == "redis" else ">= 5"
        figures.append(ratio(what, [each.ttft_ms for each in without], [each.ttft_ms for each in turns], target))
        what = f"{how.words}between tokens, with copies to {name} over without a tier"
        figures.append(ratio(what, [each.token_ms for each in turns], [each.token_ms for each in without]))
    return figures


@contextlib.contextmanager
def _tier(name: str, folder: Path) -> Iterator[None]:
    """Sets the variables that the workers of a cluster read."""
    with contextlib.ExitStack() as stack:
        match name:
            case "host":
                wanted = {"BATON_KV_HOST_BYTES": "2GiB"}
            case "disk":
                wanted = {"BATON_KV_DISK": str(folder.absolute()), "BATON_KV_DISK_BYTES": "4GiB"}
            case "redis":
                wanted = {"BATON_KV_BACKEND": stack.enter_context(_redis(folder))}
            case _:
                wanted = {}
        kept = {variable: os.environ.pop(variable) for variable in _VARIABLES if variable in os.environ}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for variable in wanted:
                del os.environ[variable]
            os.environ.update(kept)


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[str]:
    """Runs a server in memory, and yields its URL. It listens on a socket of its own in the folder."""
    assert _REDIS is not None
    path = folder.absolute() / "redis.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--maxmemory", "4gb"]
    with subprocess.Popen([_REDIS, *options], stdout=subprocess.DEVNULL, cwd=folder) as server:
        try:
            deadline_s = time.monotonic() + 20
            while not path.exists():
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"{_REDIS} has not started")
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            server.terminate()


def _turns(how: _Cluster, model: str, precision: Precision, num_tokens: int, seed: int) -> _Turns:
    num_blocks = _POOL_OF_CONVERSATION * -(-num_tokens // _BLOCK_TOKENS)
    flags = (*how.flags, "--kv-blocks", str(num_blocks))
    with (
        cluster(model, precision, *flags, module=how.module) as up,
        grpc.insecure_channel(up.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.Generate(make_request("warm", 64, 4))
        prompts = [
            list(make_request((seed, number), num_tokens, 1).token_ids.ids)
            for number in range(_POOL_OF_CONVERSATION * _TIMES_THE_POOL)
        ]
        token_ms = []
        for prompt in prompts:
            timings = stub.Generate(request_of(prompt, _ANSWER_TOKENS)).completion.timings
            token_ms.append((timings.total_ms - timings.ttft_ms) / (_ANSWER_TOKENS - 1))
        ttft_ms, cached = [], 0
        for number, prompt in enumerate(prompts):
            more = make_request((seed, number, "more"), _NEW_TOKENS, 1).token_ids.ids
            completion = stub.Generate(request_of([*prompt, *more], 2)).completion
            ttft_ms.append(completion.timings.ttft_ms)
            cached += completion.usage.cached_tokens
    return _Turns(
        sum(token_ms) / len(token_ms), sum(ttft_ms) / len(ttft_ms), 100 * cached / (num_tokens * len(prompts))
    )


def disk_rates(repeats: int) -> Findings:
    """Measures how fast the disk tier reads 2048 tokens into a pool, beside plain sequential reads of the same file."""
    rounds = max(3, repeats)
    tiers, plain = [], []
    hashes = block_hashes(range(_NUM_READ), 1)
    num_bytes = _NUM_READ * _BLOCK_BYTES
    memory = StagingArea(_NUM_READ, _BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="baton-tiers-", dir=".") as folder:
        slot_bytes = slot_bytes_for(_BLOCK_BYTES)
        file = DirectFile(f"{folder}/a.kv", slot_bytes)
        tier = DiskTier(file, "00" * 16, _BLOCK_BYTES, _NUM_READ * slot_bytes)
        tier.load()
        tier.write(hashes, [os.urandom(_BLOCK_BYTES)] * _NUM_READ)
        buffer = page_aligned(slot_bytes)
        for _ in range(rounds):
            began_s = time.perf_counter()
            for slot in range(_NUM_READ):
                file.read(slot, buffer)
            plain.append(num_bytes / (time.perf_counter() - began_s) / 1e6)
            began_s = time.perf_counter()
            assert tier.read(hashes, memory, range(_NUM_READ)) == _NUM_READ
            tiers.append(num_bytes / (time.perf_counter() - began_s) / 1e6)
        direct = file.direct
        tier.close()
    memory.close()
    how = "past the page cache" if direct else "through the page cache"
    return [
        Figure(f"disk, read one slot after another {how}", "MB/s", tuple(plain)),
        Figure("disk tier, 128 blocks into a pool, checked", "MB/s", tuple(tiers)),
        ratio("disk tier over the disk's sequential read", tiers, plain, ">= 0.8"),
    ]
