"""Translates layouts and block hashes to their proto form and back."""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import types_pb2
from services.core.errors import InvalidRequest, LayoutMismatch
from services.core.hashing import BlockHash
from services.kv.layout import TORCH, Layout

_BLOCK_HASH_BYTES = 16


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
