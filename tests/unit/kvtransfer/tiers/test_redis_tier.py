"""Tests blocks in a real Redis server: what comes back is right or is not said to be there, whatever the server does.

Debian's `redis-server` or `valkey-server` is enough; without either these tests are skipped. CI installs it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

redis = pytest.importorskip("redis")

from benchmarks.ports import free_ports  # noqa: E402
from services.core.clock import ManualClock  # noqa: E402
from services.core.errors import ConfigError  # noqa: E402
from services.kvtransfer.tiers.redis_tier import RedisTier  # noqa: E402
from services.kvtransfer.tiers.stack import TierStack  # noqa: E402
from services.kvtransfer.tiers.tier import TierFull  # noqa: E402
from tests.support.tiers import BLOCK_BYTES, FINGERPRINT, blocks_of, hashes_of, memory_of, read_from  # noqa: E402

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = [pytest.mark.skipif(SERVER is None, reason="needs redis-server or valkey-server"), pytest.mark.process]


class Server:
    def __init__(self, folder: Path) -> None:
        [self.port] = free_ports(1)
        assert SERVER is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
        self.client = redis.Redis(port=self.port)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "the server has not started"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def tier(server: Server) -> Iterator[RedisTier]:
    tier = RedisTier(server.url, FINGERPRINT, BLOCK_BYTES)
    yield tier
    tier.close()


def test_what_was_written_is_read(server: Server, tier: RedisTier) -> None:
    numbers = list(range(40))
    tier.write(hashes_of(numbers), blocks_of(numbers))
    assert tier.num_held(hashes_of([*numbers, 99])) == 40
    assert tier.num_held(hashes_of([99, *numbers])) == 0
    assert read_from(tier, *numbers, 99) == 40
    other = RedisTier(server.url, FINGERPRINT, BLOCK_BYTES)
    assert read_from(other, 3, 2, 1) == 3, "another worker's are found"
    stranger = RedisTier(server.url, "cd" * 16, BLOCK_BYTES)
    assert stranger.num_held(hashes_of([1])) == 0, "another layout's are not"
    other.close()
    stranger.close()


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "anothers", "empty", "list"])
def test_a_damaged_value_is_not_believed_and_makes_room(server: Server, tier: RedisTier, damage: str) -> None:
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    key, other = (tier._key(hash) for hash in hashes_of([2, 1]))
    value = server.client.get(key)
    assert isinstance(value, bytes)
    match damage:
        case "flipped":
            server.client.setrange(key, 1000, b"!")
        case "short":
            server.client.set(key, value[:-1])
        case "long":
            server.client.set(key, value + b"!")
        case "anothers":
            server.client.set(key, server.client.get(other))
        case "empty":
            server.client.set(key, b"")
        case "list":
            server.client.delete(key)
            server.client.rpush(key, b"x")
    assert tier.num_held(hashes_of([1, 2])) == 2
    assert read_from(tier, 1, 2) == 1
    assert tier.num_held(hashes_of([1, 2])) == 1
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    assert read_from(tier, 1, 2) == 2


def test_a_damaged_value_on_a_server_that_cannot_be_written_is_no_failure(server: Server, tier: RedisTier) -> None:
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    server.client.setrange(tier._key(hashes_of([2])[0]), 1000, b"!")
    server.client.replicaof("127.0.0.1", "1")
    assert read_from(tier, 1, 2) == 1


def test_what_the_server_has_evicted_or_lost_is_sent_again(server: Server, tier: RedisTier) -> None:
    stack = TierStack([tier], ManualClock())
    hashes = hashes_of([1, 2, 3])
    stack.write(hashes, blocks_of([1, 2, 3]))
    server.client.delete(tier._key(hashes[1]))
    server.client.setrange(tier._key(hashes[0]), 1000, b"!")
    assert [stack.takes(hash) for hash in hashes] == [False] * 3, "it is not known yet"
    memory = memory_of(3)
    assert stack.read(hashes, memory, range(3)) == 0
    memory.close()
    assert [stack.takes(hash) for hash in hashes] == [True] * 3
    stack.write(hashes, blocks_of([1, 2, 3]))
    assert read_from(tier, 1, 2, 3) == 3


def test_a_server_without_memory_is_full(server: Server, tier: RedisTier) -> None:
    tier.write(hashes_of([1]), blocks_of([1]))
    server.client.config_set("maxmemory", 1)
    with pytest.raises(TierFull):
        tier.write(hashes_of([2]), blocks_of([2]))
    assert read_from(tier, 1) == 1


def test_a_server_that_is_gone_is_left_out(server: Server, tier: RedisTier) -> None:
    clock = ManualClock()
    stack = TierStack([tier], clock)
    stack.write(hashes_of([1]), blocks_of([1]))
    assert not stack.takes(hashes_of([1])[0]), "it is not sent again"
    assert stack.num_held(hashes_of([1])) == 1
    server.process.kill()
    server.process.wait()
    assert stack.num_held(hashes_of([1])) == 0
    stack.write(hashes_of([2]), blocks_of([2]))
    [use] = stack.uses
    assert use.reading.why is not None
    assert use.blocks_refused == 1


@pytest.mark.parametrize("url", ["http://localhost", "redis://localhost:port", ""])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--kv-backend"):
        RedisTier(url, FINGERPRINT, BLOCK_BYTES)
