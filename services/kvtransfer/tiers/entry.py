"""Labels a block that is kept outside of the pool, so that what is read back is that block or is refused. Pure.

A label covers the layout's fingerprint, the block's hash and its checksum, and has a checksum of its own. A block whose
write was cut off, or whose bytes have changed since, has another checksum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from services.core.hashing import BlockHash
from services.kv.regions import Buffer
from services.kvtransfer.checksums import checksum

_MAGIC = b"batonkv\x01"
"""The last byte is the version of this form."""
_FIELDS = struct.Struct("<8s16s16sQQQ")
_SUM = struct.Struct("<Q")
LABEL_BYTES = _FIELDS.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Label:
    """Says what a block is."""

    fingerprint: bytes
    """The layout's, 16 bytes."""
    hash: BlockHash
    num_bytes: int
    checksum: int
    """The xxh3 of the block's bytes."""
    number: int = 0
    """Grows with each block that is written, so that of two the later one is known."""

    @classmethod
    def of(cls, fingerprint: bytes, hash: BlockHash, block: Buffer, number: int = 0) -> Label:
        """Returns the label of a block."""
        return cls(fingerprint, hash, memoryview(block).nbytes, checksum(block), number)

    def pack(self) -> bytes:
        """Returns the label's `LABEL_BYTES` bytes."""
        fields = _FIELDS.pack(_MAGIC, self.fingerprint, self.hash, self.num_bytes, self.checksum, self.number)
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))

    def fits(self, fingerprint: bytes, hash: BlockHash, block: Buffer) -> bool:
        """Returns whether these bytes are that block of that layout."""
        return (
            self.fingerprint == fingerprint
            and self.hash == hash
            and self.num_bytes == memoryview(block).nbytes
            and self.checksum == checksum(block)
        )


def unpack_label(data: Buffer) -> Label | None:
    """Returns the label at the start of the data, or None if there is none that is whole."""
    data = memoryview(data)[:LABEL_BYTES]
    if len(data) < LABEL_BYTES:
        return None
    fields = data[: _FIELDS.size]
    if _SUM.unpack(data[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, fingerprint, hash, num_bytes, block_sum, number = _FIELDS.unpack(fields)
    return Label(fingerprint, hash, num_bytes, block_sum, number) if magic == _MAGIC else None


def unpack_block(data: Buffer, fingerprint: bytes, hash: BlockHash, block_bytes: int) -> memoryview | None:
    """Returns the block behind the label that begins the data, or None unless it is that block of that layout."""
    label, block = unpack_label(data), memoryview(data)[LABEL_BYTES:]
    fits = label is not None and len(block) == block_bytes and label.fits(fingerprint, hash, block)
    return block if fits else None


def fingerprint_bytes(fingerprint: str) -> bytes:
    """Returns the 16 bytes of a layout's fingerprint."""
    data = bytes.fromhex(fingerprint)
    assert len(data) == 16, "a fingerprint has 32 hex digits"
    return data
