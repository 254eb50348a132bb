"""Defines what two workers must have in common to exchange KV blocks, and how many bytes a block has. Pure.

Owns: the layout and its fingerprint. Never: the memory itself, or the layout's proto form (`kvtransfer/wire.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import TypeAlias

from services.core.hashing import num_blocks_for

LAYOUT_VERSION = 2
"""The version of the order of bytes in a block ([layer, key/value, token, kv head, row], C order), of rows, and of what
the digests cover."""

TORCH = "torch"
"""The engine of this project's own, and of whoever names none."""

SCALE_BYTES = 4
"""Bytes of the scale behind a row of int8: a float32, by which each of the row's numbers is multiplied."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


BlockShape: TypeAlias = tuple[int, int, int, int, int]
"""A block's shape: [layer, key/value, token, kv head, row]."""


def row_length(head_dim: int, dtype: str) -> int:
    """Returns the elements of a row, which is what a token has for a kv head in a layer: head_dim numbers, with their
    scale behind them if they are int8."""
    return head_dim + SCALE_BYTES if dtype == "int8" else head_dim


def block_shape(num_layers: int, block_size: int, num_kv_heads: int, row_length: int) -> BlockShape:
    """Returns a block's shape, [layer, key/value, token, kv head, row], in the order of its bytes."""
    return num_layers, 2, block_size, num_kv_heads, row_length


def block_bytes(shape: BlockShape, element_bytes: int) -> int:
    """Returns the bytes of one block over all layers."""
    return math.prod(shape) * element_bytes


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Returns the bytes of one token over all layers. Raises KeyError for an unknown dtype."""
    return block_bytes(block_shape(num_layers, 1, num_kv_heads, row_length(head_dim, dtype)), _ELEMENT_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Layout:
    """Keeps what two workers must have in common to exchange KV (ADR 0007): they pair iff their layouts are equal."""

    model_id: str
    weights_digest: str
    config_digest: str
    dtype: str
    """The cache's type: float32, bfloat16, float16 or int8."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """How many tokens a block holds."""
    layout_version: int = LAYOUT_VERSION
    engine: str = TORCH
    """What computes the blocks, such as "torch" or "vllm". Engines never exchange KV, whatever their digests are."""

    @property
    def fingerprint(self) -> str:
        """Returns a hash of all fields in 32 hex digits: the `kv` part of a worker's fingerprint."""
        fields = dataclasses.asdict(self)
        if self.engine == TORCH:
            del fields["engine"]  # it had no name when it was the only one, and tiers hold blocks of that time
        text = json.dumps(fields, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one block over all layers. Raises KeyError for an unknown dtype."""
        return self.block_size * token_bytes(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype)

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens; the last block may be partial."""
        return num_blocks_for(num_tokens, self.block_size)

    def mismatch(self, other: Layout) -> str | None:
        """Returns the fields that differ, as `name: ours != theirs`, or None if the two pair."""
        differences = [
            f"{field.name}: {_shown(getattr(self, field.name))} != {_shown(getattr(other, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
        return ", ".join(differences) or None


def _shown(value: object) -> str:
    """Returns a field's value for logs and statuses. It bounds text, since a peer may send anything."""
    return str(value) if isinstance(value, int) else repr(value)[:64]
