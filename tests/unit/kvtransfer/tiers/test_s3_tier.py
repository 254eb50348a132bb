"""Tests blocks in a bucket of a server that speaks S3: what comes back is right or is not said to be there, whatever
the server does. The server is moto's, which the extra `dev` installs; without it these tests are skipped."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("obstore", reason="needs the extra s3")
pytest.importorskip("moto", reason="needs moto, a server that speaks S3")

from services.core.clock import ManualClock
from services.core.errors import ConfigError
from services.kvtransfer.tiers.s3_tier import S3Tier
from services.kvtransfer.tiers.stack import TierStack
from services.kvtransfer.tiers.tier import TierFailed
from tests.support.s3_server import S3Server
from tests.support.tiers import BLOCK_BYTES, FINGERPRINT, a_hash, blocks_of, hashes_of, read_from

pytestmark = pytest.mark.process

URL = f"s3://{S3Server.bucket}/some/cluster"


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    running.empty()
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def tier(server: S3Server) -> Iterator[S3Tier]:
    tier = S3Tier(URL, FINGERPRINT, BLOCK_BYTES)
    yield tier
    tier.close()


def key_of(number: int) -> str:
    return f"some/cluster/{FINGERPRINT}/{a_hash(number).hex()}"


def test_what_was_written_is_read(tier: S3Tier) -> None:
    numbers = list(range(40))
    tier.write(hashes_of(numbers), blocks_of(numbers))
    assert tier.num_held(hashes_of([*numbers, 99])) == 40
    assert tier.num_held(hashes_of([99, *numbers])) == 0
    assert read_from(tier, *numbers, 99) == 40
    other = S3Tier(URL, FINGERPRINT, BLOCK_BYTES)
    assert read_from(other, 3, 2, 1) == 3, "another worker's are found"
    stranger = S3Tier(URL, "cd" * 16, BLOCK_BYTES)
    assert stranger.num_held(hashes_of([1])) == 0, "another layout's are not"
    neighbour = S3Tier(f"s3://{S3Server.bucket}", FINGERPRINT, BLOCK_BYTES)
    assert neighbour.num_held(hashes_of([1])) == 0, "another prefix's are not"
    for each in (other, stranger, neighbour):
        each.close()


def test_each_block_is_one_object_and_is_written_once(server: S3Server, tier: S3Tier) -> None:
    tier.write(hashes_of([1]), blocks_of([1]))
    before = server.get(key_of(1))
    tier.write(hashes_of([1, 2]), blocks_of([7, 2]))
    assert sorted(server.all_keys()) == sorted([key_of(1), key_of(2)])
    assert server.get(key_of(1)) == before


def test_a_server_that_cannot_put_if_absent_is_written_to(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    tier = S3Tier(URL, FINGERPRINT, BLOCK_BYTES)
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    assert read_from(tier, 1, 2) == 2
    tier.close()


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "anothers", "empty"])
def test_a_server_that_lies_is_not_believed_and_the_object_is_written_anew(
    server: S3Server, tier: S3Tier, damage: str
) -> None:
    tier.write(hashes_of([1, 2, 3]), blocks_of([1, 2, 3]))
    value = server.get(key_of(2))
    damaged = {
        "flipped": value[:1000] + bytes([value[1000] ^ 1]) + value[1001:],
        "short": value[:-1],
        "long": value + b"!",
        "anothers": server.get(key_of(1)),
        "empty": b"",
    }[damage]
    server.put(key_of(2), damaged)
    assert read_from(tier, 1, 2, 3) == 1
    assert key_of(2) not in server.all_keys()
    tier.write(hashes_of([2]), blocks_of([2]))
    assert read_from(tier, 1, 2, 3) == 3


def test_an_object_of_another_size_is_not_said_to_be_there(server: S3Server, tier: S3Tier) -> None:
    server.put(key_of(1), b"no block")
    assert tier.num_held(hashes_of([1])) == 0
    tier.write(hashes_of([1]), blocks_of([1]))
    assert tier.num_held(hashes_of([1])) == 1


def test_the_caller_may_use_its_blocks_again_when_a_write_has_failed(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests that are under way then must not see other bytes under the old label."""
    tier = S3Tier(URL, FINGERPRINT, BLOCK_BYTES)
    memory = bytearray(blocks_of([1])[0])
    real, counter = tier._put, itertools.count()

    def put(labelled: tuple[bytes, bytes]) -> None:
        if next(counter) == 0:
            raise TierFailed("refused")
        memory[:] = bytes(BLOCK_BYTES)
        real(labelled)

    monkeypatch.setattr(tier, "_put", put)
    with pytest.raises(TierFailed):
        tier.write(hashes_of([9, 1]), [blocks_of([9])[0], memory])
    tier.close()
    reader = S3Tier(URL, FINGERPRINT, BLOCK_BYTES)
    assert read_from(reader, 1) == len([key for key in server.all_keys() if key == key_of(1)])
    reader.close()


def test_a_server_that_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    stack = TierStack([S3Tier(URL, FINGERPRINT, BLOCK_BYTES)], ManualClock())
    try:
        stack.write(hashes_of([1]), blocks_of([1]))
        assert not stack.takes(hashes_of([1])[0]), "it is not sent again"
        assert stack.num_held(hashes_of([1])) == 1
    finally:
        server.stop()
    assert stack.num_held(hashes_of([1])) == 0
    stack.write(hashes_of([2]), blocks_of([2]))
    [use] = stack.uses
    assert use.reading.why is not None
    assert use.blocks_refused == 1
    stack.close()


def test_a_bucket_that_is_not_there_is_said_at_the_start(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    tier = S3Tier("s3://no-such-bucket/p", FINGERPRINT, BLOCK_BYTES)
    assert tier.num_held(hashes_of([1])) == 0
    with pytest.raises(TierFailed, match="NoSuchBucket"):
        tier.write(hashes_of([1]), blocks_of([1]))
    tier.close()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "--kv-backend: there is no bucket no-such-bucket, so nothing is kept in it"
    ]


def test_nothing_is_said_of_a_bucket_that_is_there(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    S3Tier(URL, FINGERPRINT, BLOCK_BYTES).close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///p", "s3://user:hunter2@bucket/p", "s3://bucket/p?hunter2", "s3://bucket/../p", "s3:bucket"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--kv-backend") as raised:
        S3Tier(url, FINGERPRINT, BLOCK_BYTES)
    assert "hunter2" not in str(raised.value)


def test_a_slow_bucket_is_not_asked_for_longer_than_anybody_waits(
    tier: S3Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked has given up by then, and the thread is one of few."""
    monkeypatch.setattr("services.kvtransfer.tiers.s3_tier.WHOLE_S", 0.2)

    def has(_: bytes) -> bool:
        time.sleep(0.05)
        return True

    monkeypatch.setattr(tier, "_has", has)
    began_s = time.monotonic()
    assert 0 < tier.num_held(hashes_of(range(1000))) < 1000
    assert time.monotonic() - began_s < 2.0
