"""Tests the disk tier: what it finds after a restart, and that no fault of the disk makes it give a wrong block."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.kvtransfer.tiers.disk import slot_bytes_for
from services.kvtransfer.tiers.slot_file import PAGE_BYTES, DirectFile
from services.kvtransfer.tiers.tier import TierFailed, TierFull
from tests.support.examples import num_examples
from tests.support.tiers import BLOCK_BYTES, blocks_of, content, faulty_disk, hashes_of, loaded_disk, memory_of

SLOT_BYTES = slot_bytes_for(BLOCK_BYTES)


def read(path: Path, num_slots: int, numbers: Sequence[int]) -> list[bytes]:
    """Opens the file anew and returns the blocks that are found of these."""
    tier = loaded_disk(path, num_slots)
    memory = memory_of(len(numbers))
    try:
        num_read = tier.read(hashes_of(numbers), memory, range(len(numbers)))
        return content(memory)[:num_read]
    finally:
        memory.close()
        tier.close()


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    tier = loaded_disk(tmp_path / "a.kv", 4)
    tier.write(hashes_of([1, 2, 3]), blocks_of([1, 2, 3]))
    tier.close()
    assert read(tmp_path / "a.kv", 4, [1, 2, 3]) == blocks_of([1, 2, 3])


def test_of_a_larger_file_the_rest_is_cut_off(tmp_path: Path) -> None:
    tier = loaded_disk(tmp_path / "a.kv", 4)
    tier.write(hashes_of([1, 2, 3]), blocks_of([1, 2, 3]))
    tier.close()
    assert read(tmp_path / "a.kv", 2, [1, 2, 3]) == blocks_of([1, 2])
    assert (tmp_path / "a.kv").stat().st_size == 2 * SLOT_BYTES


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    tier = loaded_disk(tmp_path / "a.kv", 1)
    with pytest.raises(BlockingIOError):
        DirectFile(str(tmp_path / "a.kv"), SLOT_BYTES)
    tier.close()


@pytest.mark.parametrize("how", ["link", "second name", "open to others", "pipe", "folder"])
def test_a_file_that_others_may_have_prepared_is_refused(tmp_path: Path, how: str) -> None:
    """They could forge blocks there, which labels do not keep them from, and read what prompts become."""
    path, theirs = tmp_path / "a.kv", tmp_path / "theirs"
    theirs.touch(mode=0o600)
    match how:
        case "link":
            path.symlink_to(theirs)
        case "second name":
            path.hardlink_to(theirs)
        case "open to others":
            path.touch()
            path.chmod(0o660)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "folder":
            path.mkdir()
    with pytest.raises(OSError, match=r"a\.kv"):
        DirectFile(str(path), SLOT_BYTES)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.kv").touch(mode=0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        DirectFile(str(tmp_path / "a.kv"), SLOT_BYTES)


def test_another_layouts_blocks_are_not_found(tmp_path: Path) -> None:
    tier = loaded_disk(tmp_path / "a.kv", 2)
    tier.write(hashes_of([1]), blocks_of([1]))
    tier.close()
    other, _ = faulty_disk(tmp_path / "a.kv", 2, fingerprint="cd" * 16)
    other.load()
    assert list(other.held()) == []
    other.close()


def test_nothing_is_written_before_the_index_is_made(tmp_path: Path) -> None:
    tier, _ = faulty_disk(tmp_path / "a.kv", 2)
    tier.write(hashes_of([1]), blocks_of([1]))
    assert list(tier.held()) == []
    tier.load()
    tier.write(hashes_of([1]), blocks_of([1]))
    assert list(tier.held()) == hashes_of([1])
    tier.close()


@settings(max_examples=num_examples(60), deadline=None)
@given(torn_at=st.integers(0, SLOT_BYTES - 1), overwritten=st.booleans())
def test_a_torn_write_is_never_taken_for_a_block(
    tmp_path_factory: pytest.TempPathFactory, torn_at: int, overwritten: bool
) -> None:
    path = tmp_path_factory.mktemp("torn") / "a.kv"
    tier, file = faulty_disk(path, 1)
    tier.load()
    if overwritten:
        tier.write(hashes_of([1]), blocks_of([1]))
    file.torn_at = torn_at
    with pytest.raises(TierFailed):
        tier.write(hashes_of([2]), blocks_of([2]))
    assert list(tier.held()) == [], "the slot was given to the new block"
    tier.close()
    old, new = read(path, 1, [1]), read(path, 1, [2])
    assert old in ([], blocks_of([1]))
    assert new in ([], blocks_of([2])), "the whole block, if only what is behind it was not written"
    if torn_at <= PAGE_BYTES:
        assert not new
    if torn_at > PAGE_BYTES:
        assert not old


@settings(max_examples=num_examples(60), deadline=None)
@given(place=st.integers(0, SLOT_BYTES - 1))
def test_a_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, place: int) -> None:
    tier, file = faulty_disk(tmp_path_factory.mktemp("flip") / "a.kv", 2)
    tier.load()
    tier.write(hashes_of([1]), blocks_of([1]))
    memory = memory_of(1)
    file.flipped_at = place
    found = tier.read(hashes_of([1]), memory, [0])
    assert content(memory)[:found] == blocks_of([1])[:found], "padding is nobody's"
    if found:
        assert place > PAGE_BYTES + BLOCK_BYTES - 1 or place < PAGE_BYTES
    else:
        assert tier.num_corrupt == 1
        assert list(tier.held()) == [], "it is not tried again"
    memory.close()
    tier.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_can_still_be_read(tmp_path: Path, number: int) -> None:
    tier, file = faulty_disk(tmp_path / "a.kv", 4)
    tier.load()
    tier.write(hashes_of([1]), blocks_of([1]))
    file.write_errno = number
    with pytest.raises(TierFull):
        tier.write(hashes_of([2]), blocks_of([2]))
    memory = memory_of(1)
    assert tier.read(hashes_of([1]), memory, [0]) == 1
    file.write_errno = 0
    tier.write(hashes_of([2]), blocks_of([2]))
    assert tier.num_held(hashes_of([1, 2])) == 2
    memory.close()
    tier.close()


def test_errors_are_said(tmp_path: Path) -> None:
    tier, file = faulty_disk(tmp_path / "a.kv", 4)
    tier.load()
    tier.write(hashes_of([1, 2]), blocks_of([1, 2]))
    file.read_errno = file.write_errno = errno.EIO
    memory = memory_of(2)
    with pytest.raises(TierFailed, match="cannot be read"):
        tier.read(hashes_of([1, 2]), memory, [0, 1])
    with pytest.raises(TierFailed, match="cannot be written"):
        tier.write(hashes_of([3]), blocks_of([3]))
    file.read_errno = 0
    assert tier.read(hashes_of([1, 2]), memory, [0, 1]) == 2, "an error says nothing about the blocks"
    memory.close()
    tier.close()


def test_an_unreadable_file_is_said_at_the_start(tmp_path: Path) -> None:
    loaded_disk(tmp_path / "a.kv", 1).close()
    tier = loaded_disk(tmp_path / "a.kv", 1)
    tier.write(hashes_of([1]), blocks_of([1]))
    tier.close()
    tier, file = faulty_disk(tmp_path / "a.kv", 1)
    file.read_errno = errno.EIO
    with pytest.raises(TierFailed):
        tier.load()
    tier.close()


def test_whoever_asks_does_not_wait_until_the_index_is_made(tmp_path: Path) -> None:
    """The index of a large file takes a second, and a worker asks its tiers on the event loop."""
    tier = loaded_disk(tmp_path / "a.kv", 4)
    tier.write(hashes_of(range(4)), blocks_of(range(4)))
    tier.close()
    tier, _ = faulty_disk(tmp_path / "a.kv", 4)
    answers: list[int] = []

    def stored(hash: bytes) -> None:
        asking = threading.Thread(target=lambda: answers.append(tier.num_held(hashes_of(range(4)))), daemon=True)
        asking.start()
        asking.join(20)

    tier.follow(stored, lambda hash: None)
    tier.load()
    assert answers == [0] * 4
    assert tier.num_held(hashes_of(range(4))) == 4
    tier.close()
