"""What must be equal for KV blocks to be exchanged, and how many bytes they have.

Pure. Never: the memory itself, or its proto form (`wire`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from services.core.hashing import num_blocks_for

LAYOUT_VERSION = 1
"""Of the bytes within a block: [layer, key/value, token, kv head, head_dim], C order."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout fingerprint (DESIGN §5). Equal layouts, and only they, pair."""

    model_id: str
    weights_digest: str
    dtype: str
    """Of the cache: float32, bfloat16 or float16."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block holds."""
    layout_version: int = LAYOUT_VERSION

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers. KeyError for an unknown dtype."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * _ELEMENT_BYTES[self.dtype]

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens; the last may be partial."""
        return num_blocks_for(num_tokens, self.block_size)

    def mismatch(self, other: Layout) -> str | None:
        """Which fields differ, as `name: ours != theirs`, or None when the two pair."""
        differences = [
            f"{field.name}: {getattr(self, field.name)} != {getattr(other, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]
        return ", ".join(differences) or None
