"""Reckons how much memory and time the KV of conversations takes. Pure.

Owns: what a model's configuration says about the size of its KV. Never: what a running worker has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.core.errors import UnsupportedModel
from services.core.hashing import num_blocks_for
from services.kv.layout import token_bytes

HANDOFF_MS = 3.0
"""What a handoff takes beside its bytes, in milliseconds: the fetch that opens, announcements, the seal, the Release.

It is that of 128 tokens between two processes of one host (benchmarks/results/2026-11-29-transfer.json). A link's own
delay adds to it.
"""


@dataclass(frozen=True, slots=True)
class KVShapeOfModel:
    """Keeps what of a model its KV's size depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVSize:
    """Says what the KV of one sequence takes."""

    token_bytes: int
    block_size: int
    num_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def num_blocks(self) -> int:
        return num_blocks_for(self.num_tokens, self.block_size)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the sequence's blocks; the last one may be partial and takes as much."""
        return self.num_blocks * self.block_bytes

    def num_sequences(self, memory_bytes: int) -> int:
        """Returns how many of these sequences, which share nothing, fit into the memory."""
        return memory_bytes // self.block_bytes // max(1, self.num_blocks)

    def seconds(self, bytes_per_s: float) -> float:
        """Returns how long the blocks take at this bandwidth."""
        return self.num_bytes / bytes_per_s

    def pays_from(self, bytes_per_s: float, ms_per_token: float) -> int | None:
        """Returns from how many tokens on a prompt's KV arrives sooner than the prompt is computed where it is decoded;
        None if it never does. What of the transfer goes on beside the prompt's computation is not taken off."""
        saved_ms = ms_per_token - 1e3 * self.token_bytes / bytes_per_s
        return max(1, math.floor(HANDOFF_MS / saved_ms) + 1) if saved_ms > 0 else None


def kv_shape_of(config: Mapping[str, Any]) -> KVShapeOfModel:
    """Returns the shape that a model's config.json, as transformers write it, describes. Raises UnsupportedModel."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    try:
        num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModel(f"its config.json does not say how large its KV is: {error!r}") from error
    if min(num_layers, num_kv_heads, head_dim) < 1:
        raise UnsupportedModel("its config.json describes a model without KV")
    return KVShapeOfModel(num_layers, num_kv_heads, head_dim)


def size_of(shape: KVShapeOfModel, dtype: str, block_size: int, num_tokens: int) -> KVSize:
    """Returns what a sequence of that length takes with this type of cache. Raises KeyError for an unknown type."""
    each = token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    return KVSize(each, block_size, num_tokens)
