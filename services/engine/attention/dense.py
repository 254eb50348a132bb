"""Computes paged attention by gathering blocks and multiplying, on any device and with every feature.

Decodes of similar length run as one padded batch, prefill chunks one sequence at a time. The kind of product was chosen
by measurement on CPUs: scaled_dot_product_attention in float32; in bfloat16 plain matrix products, which take half the
time for batches of decodes, and two thirds for chunks unless the CPU has AMX.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.attention.dense_products import Chunk, DecodeGroup, products_of
from services.engine.attention.int8_rows import as_numbers
from services.engine.attention.paged import Scoring, StepLayout

_MAX_BLOCK_DIAGONAL_WIDTH = 1024
"""Largest num_kv_heads * head_dim for which decodes use a block-diagonal query. Beyond it, the zeros of that query cost
more than the copies it saves."""
_QUERY_TILE = 256
"""Rows of a chunk in one product. Small enough that the scores stay in the CPU's cache, and that keys which no row of
the tile sees are left out."""


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: StepLayout, scoring: Scoring
) -> Tensor:
    """Computes attention as `paged.PagedAttention` defines it."""
    window, softcap = scoring.sliding_window, scoring.softcap
    products = layout.derived(("dense", window), lambda: products_of(layout, key_cache.shape[1], window, query))
    decode_by_products = softcap is not None or _prefers_products(query.dtype, query.device.type)
    chunk_by_products = softcap is not None or (decode_by_products and not has_amx())
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in products.decodes:
        attend = _decode_by_products if decode_by_products else _decode_fused
        output[group.rows] = attend(query[group.rows], key_cache, value_cache, group, scoring)
    for chunk in products.chunks:
        keys = _gather(key_cache, chunk.blocks, query.dtype)[chunk.keys]
        values = _gather(value_cache, chunk.blocks, query.dtype)[chunk.keys]
        if chunk_by_products:
            _chunk_by_products(query[chunk.rows], keys, values, output[chunk.rows], chunk, scoring)
        else:
            output[chunk.rows] = _chunk_fused(query[chunk.rows], keys, values, chunk, scoring.scale)
    return output


def _prefers_products(dtype: torch.dtype, device_type: str) -> bool:
    return device_type == "cpu" and dtype != torch.float32


@cache
def has_amx() -> bool:
    """Returns whether oneDNN multiplies bfloat16 with AMX here."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _gather(blocks: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Copies some blocks as numbers of this type: [len(index) * block_size, heads, head_dim].

    blocks: [num_blocks, block_size, heads, head_dim] of the same type, or rows in 8 bits.
    """
    rows = blocks.flatten(1).index_select(0, index).view(-1, *blocks.shape[2:])
    return as_numbers(rows, dtype)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


# -- decodes: query [batch, num_heads, head_dim] -------------------------------------------------------------------


def _decode_fused(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scoring: Scoring
) -> Tensor:
    batch, _, head_dim = query.shape
    heads = key_cache.shape[2]
    keys = _gather(key_cache, group.blocks, query.dtype).view(batch, -1, heads, head_dim)
    values = _gather(value_cache, group.blocks, query.dtype).view(batch, -1, heads, head_dim)
    bias: Tensor | None = group.bias
    if group.only_keys is not None:
        keys, values, bias = keys[:, group.only_keys], values[:, group.only_keys], None
    # The query heads of one key head stand in the dimension of query positions, so that no key is copied for them.
    grouped = query.view(batch, heads, -1, head_dim)
    mask = None if bias is None else bias[:, None]
    return scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scoring.scale
    ).reshape(query.shape)


def _decode_by_products(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scoring: Scoring
) -> Tensor:
    batch, num_heads, head_dim = query.shape
    heads = key_cache.shape[2]
    if scoring.softcap is None and (group.only_keys is not None or heads * head_dim > _MAX_BLOCK_DIAGONAL_WIDTH):
        return _decode_fused(query, key_cache, value_cache, group, scoring)
    # Each head's query, padded with zeros, multiplies the keys of all heads without a copy: [keys, heads * head_dim].
    keys = _gather(key_cache, group.blocks, query.dtype).view(batch, -1, heads * head_dim)
    values = _gather(value_cache, group.blocks, query.dtype).view(batch, -1, heads * head_dim)
    queries = (query * scoring.scale).view(batch, heads, -1, 1, head_dim)
    queries = (queries * _identity(heads, query)).view(batch, num_heads, heads * head_dim)
    scores = _capped(torch.bmm(queries, keys.transpose(1, 2)), scoring.softcap).add_(group.bias)
    mixed = torch.bmm(scores.softmax(-1), values).view(batch, heads, -1, heads, head_dim)
    return mixed.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(query.shape)


@cache
def _identity_of(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(heads, dtype=dtype, device=device).view(1, heads, 1, heads, 1)


def _identity(heads: int, like: Tensor) -> Tensor:
    """Returns the identity matrix as [1, heads, 1, heads, 1], with the dtype and device of `like`."""
    return _identity_of(heads, like.dtype, like.device)


# -- chunks: query [query_len, num_heads, head_dim]; keys, values [num_keys, heads, head_dim] ----------------------


def _chunk_fused(query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk, scale: float) -> Tensor:
    mixed = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=None if chunk.starts_fresh else chunk.bias(0, chunk.query_len, slice(0, len(keys))),
        is_causal=chunk.starts_fresh,
        scale=scale,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1)


def _chunk_by_products(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, chunk: Chunk, scoring: Scoring
) -> None:
    heads, head_dim = keys.shape[1:]
    keys = keys.permute(1, 2, 0)  # [heads, head_dim, num_keys]
    values = values.transpose(0, 1).contiguous()
    scaled = (
        (query * scoring.scale).view(chunk.query_len, heads, -1, head_dim).permute(1, 2, 0, 3)
    )  # [heads, group, query, dim]
    for start in range(0, chunk.query_len, _QUERY_TILE):
        end = min(start + _QUERY_TILE, chunk.query_len)
        seen = chunk.seen(start, end)
        tile = scaled[:, :, start:end].reshape(heads, -1, head_dim)
        scores = _capped(torch.bmm(tile, keys[:, :, seen]), scoring.softcap).view(
            -1, end - start, seen.stop - seen.start
        )
        masked = chunk.masked(start, end)
        scores[:, :, masked.start - seen.start :].add_(chunk.bias(start, end, masked))
        weights = scores.softmax(-1)
        mixed = torch.bmm(weights.view(heads, -1, seen.stop - seen.start), values[:, seen]).view(
            heads, -1, end - start, head_dim
        )
        output[start:end] = mixed.permute(2, 0, 1, 3).flatten(1, 2)
