"""Translates layouts, block hashes and announcements of blocks to their proto form and back.

Announcements that carry the blocks' bytes are put together and taken apart here: protobuf would copy the bytes three
times into a message, and twice out of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import InvalidRequest, LayoutMismatch
from services.core.hashing import BlockHash
from services.kv.layout import TORCH, Layout
from services.kv.regions import Buffer

_BLOCK_HASH_BYTES = 16
_VARINT, _BYTES = 0, 2
_FIXED_LENGTH = {1: 8, 5: 4}
"""Wire types of protobuf; of fixed length, with that."""
_DATA_TAG = kvtransfer_pb2.FetchBlocks.DATA_FIELD_NUMBER << 3 | _BYTES
_BLOCKS_TAG = kvtransfer_pb2.FetchResponse.BLOCKS_FIELD_NUMBER << 3 | _BYTES


@dataclass(frozen=True, slots=True)
class Announced:
    """Is a FetchBlocks as its destination has it."""

    first_block: int
    pool_blocks: Sequence[int]
    num_blocks: int
    checksums: Sequence[int]
    more_follow: bool
    data: Sequence[Buffer]
    """The blocks' bytes, where they lie in what was received."""

    @classmethod
    def of(cls, blocks: kvtransfer_pb2.FetchBlocks, data: Sequence[Buffer]) -> Announced:
        """Returns what `blocks` says, with its `data` apart."""
        return cls(
            blocks.first_block, blocks.pool_blocks, blocks.num_blocks, blocks.checksums, blocks.more_follow, data
        )


def carrying(blocks: kvtransfer_pb2.FetchBlocks, data: Sequence[Buffer]) -> bytes:
    """Returns the bytes of a FetchResponse of `blocks` with this `data`, which is copied once."""
    parts: list[Buffer] = [blocks.SerializeToString()]
    for block in data:
        parts += (_varint(_DATA_TAG), _varint(len(block)), block)
    return b"".join((_varint(_BLOCKS_TAG), _varint(sum(map(len, parts))), *parts))


def response_of(received: bytes) -> tuple[kvtransfer_pb2.FetchResponse, Sequence[Buffer]]:
    """Returns a FetchResponse, and the bytes of blocks in it: as views of what was received, and no longer in the
    response. Raises an error if it is none."""
    _, blocks = _without(_BLOCKS_TAG, memoryview(received))
    if len(blocks) != 1:
        response = kvtransfer_pb2.FetchResponse.FromString(received)
        return response, list(response.blocks.data)
    head, carried = _without(_DATA_TAG, blocks[0])
    return kvtransfer_pb2.FetchResponse(blocks=kvtransfer_pb2.FetchBlocks.FromString(head)), carried


def _without(tag: int, message: memoryview) -> tuple[bytes, list[memoryview]]:
    """Takes the fields with a tag out of a message's bytes. Returns the others, and the contents of these."""
    others, found, at = [], [], 0
    while at < len(message):
        start = at
        this, at = _read_varint(message, at)
        if (kind := this & 7) == _VARINT:
            _, end = _read_varint(message, at)
        elif kind == _BYTES:
            length, at = _read_varint(message, at)
            end = at + length
        else:
            end = at + _FIXED_LENGTH[kind]
        if end > len(message):
            raise ValueError("a field ends behind its message")
        if this == tag:
            found.append(message[at:end])
        else:
            others.append(message[start:end])
        at = end
    return b"".join(others), found


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns the number at a place, and the place behind it."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at


def join_hashes(hashes: Sequence[BlockHash]) -> bytes:
    return b"".join(hashes)


def split_hashes(field: str, data: bytes) -> list[BlockHash]:
    """Returns the hashes that `join_hashes` has joined. Raises InvalidRequest unless they are whole."""
    if len(data) % _BLOCK_HASH_BYTES:
        raise InvalidRequest(field, f"{len(data)} bytes are no hashes of {_BLOCK_HASH_BYTES} bytes")
    return [data[at : at + _BLOCK_HASH_BYTES] for at in range(0, len(data), _BLOCK_HASH_BYTES)]


def layout_to_proto(layout: Layout) -> types_pb2.KVLayout:
    return types_pb2.KVLayout(
        model_id=layout.model_id,
        weights_digest=layout.weights_digest,
        config_digest=layout.config_digest,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        layout_version=layout.layout_version,
        engine=layout.engine,
    )


def whole_shard(layout: Layout) -> types_pb2.KVShard:
    """Returns the part of a block that is all of it."""
    return types_pb2.KVShard(num_layers=layout.num_layers, num_kv_heads=layout.num_kv_heads)


def require_whole(shards: Sequence[types_pb2.KVShard], layout: Layout) -> None:
    """Raises LayoutMismatch if an offer is of parts of the blocks; without a list it is of whole ones."""
    if shards and list(shards) != [whole_shard(layout)]:
        parts = "; ".join(
            f"layers {shard.first_layer} + {shard.num_layers}, kv heads {shard.first_kv_head} + {shard.num_kv_heads}"
            for shard in shards[:4]
        )
        raise LayoutMismatch(f"shards: the source offers {parts}, and this worker takes whole blocks")


def layout_from_proto(layout: types_pb2.KVLayout) -> Layout:
    """Returns the layout as received. Its values are not checked."""
    return Layout(
        model_id=layout.model_id,
        weights_digest=layout.weights_digest,
        config_digest=layout.config_digest,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        layout_version=layout.layout_version,
        engine=layout.engine or TORCH,
    )
