"""Translates layouts to their proto form and back."""

from __future__ import annotations

from baton.v1 import types_pb2
from services.kv.layout import Layout


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
    )


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
    )
