"""What must be equal for KV blocks to be exchanged, and how many bytes they have.

Pure. Never: the memory itself, or its proto form (`wire`).
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
"""Of the bytes within a block ([layer, key/value, token, kv head, head_dim], C order) and of what the digests cover."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


BlockShape: TypeAlias = tuple[int, int, int, int, int]
"""[layer, key/value, token, kv head, head_dim]"""


def block_shape(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> BlockShape:
    """The elements of one block, in the order in which they lie."""
    return num_layers, 2, block_size, num_kv_heads, head_dim


def block_bytes(shape: BlockShape, element_bytes: int) -> int:
    """Bytes of one block over all layers."""
    return math.prod(shape) * element_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """What two workers must have in common to exchange KV (ADR 0007). Equal layouts, and only they, pair."""

    model_id: str
    weights_digest: str
    config_digest: str
    dtype: str
    """Of the cache: float32, bfloat16 or float16."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block holds."""
    layout_version: int = LAYOUT_VERSION

    @property
    def fingerprint(self) -> str:
        """The whole of it in 32 hex digits: the `kv` part of a worker's fingerprint."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers. KeyError for an unknown dtype."""
        shape = block_shape(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim)
        return block_bytes(shape, _ELEMENT_BYTES[self.dtype])

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens; the last may be partial."""
        return num_blocks_for(num_tokens, self.block_size)

    def mismatch(self, other: Layout) -> str | None:
        """Which fields differ, as `name: ours != theirs`, or None when the two pair."""
        differences = [
            f"{field.name}: {_shown(getattr(self, field.name))} != {_shown(getattr(other, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
        return ", ".join(differences) or None


def _shown(value: object) -> str:
    """For logs and statuses: the other one's fields are what a peer says of itself."""
    return str(value) if isinstance(value, int) else repr(value)[:64]
