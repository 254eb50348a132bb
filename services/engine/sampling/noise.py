"""Computes random numbers as a function of (seed, position, token id), without state and the same on any device.

For one seed, the token drawn at a position depends only on its logits, so a request that resumes elsewhere, or shares a
batch with others, continues identically. The hash is the 32-bit finaliser of MurmurHash3 in wrapping int32 arithmetic,
over a mixed token id. Its key has 64 bits, which splitmix64 (Steele et al., OOPSLA 2014) makes of seed and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from services.core.seeds import splitmix64

_MASK_64 = (1 << 64) - 1
_MULTIPLIERS = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))  # of MurmurHash3, as int32
_HALF = float(1 << 31)
_FULL = 2 * _HALF


def keys(seeds_and_positions: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Returns the key of each pair (seed, output position) as two int32: [2, num_rows], on `device`."""
    mixed = [splitmix64(splitmix64(seed & _MASK_64) ^ position) for seed, position in seeds_and_positions]
    halves = np.array(mixed, dtype=np.uint64).view(np.int32).reshape(-1, 2)
    return torch.from_numpy(halves).T.to(device)


def hash_all(keys: Tensor, vocab_size: int) -> Tensor:
    """Returns the hashes of all tokens for each of the keys [2, num_rows]: [num_rows, vocab_size] int32.

    They are uniform over all of int32.
    """
    return _mix(_token_hashes(vocab_size, keys.device) ^ keys[0, :, None], keys[1, :, None])


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns noise of the standard Gumbel distribution, [n, ...] float64, for keys [2, n] and token_ids [n, ...].

    It is -log(-log(u)), where u in (0, 1) is the token's hash scaled.
    """
    shape = (-1, *[1] * (token_ids.dim() - 1))
    hashes = _mix(_mix_tokens(token_ids.int()) ^ keys[0].view(shape), keys[1].view(shape))
    return -torch.log(-torch.log((hashes.double() + (_HALF + 0.5)) / _FULL))


def least_hash(gumbel_noise: Tensor) -> Tensor:
    """Returns int32 hashes, in the shape of `gumbel_noise`: no token with a smaller hash has at least that noise.

    They are smaller than the inverse of `gumbel` by a margin for roundings.
    """
    uniform = torch.exp(-torch.exp(-gumbel_noise.double()))
    return (uniform * _FULL - (_HALF + 2)).clamp(-_HALF, _HALF - 1).int()


@cache
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    return _mix_tokens(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _mix_tokens(token_ids: Tensor) -> Tensor:
    """Mixes the bits of token ids by a bijection, so that no two tokens have the same noise under every key."""
    return _mix(token_ids ^ 0x2545F491, 0)


def _mix(hashes: Tensor, key: Tensor | int) -> Tensor:
    """Mixes `hashes` (int32) with `key`, in place, and returns them.

    Right shifts of int32 copy the sign bit; the masks clear the copies, as the shifts of MurmurHash3 are unsigned.
    """
    shifted = hashes >> 16
    hashes ^= shifted.bitwise_and_(0xFFFF)
    hashes *= _MULTIPLIERS[0]
    hashes ^= key
    torch.bitwise_right_shift(hashes, 13, out=shifted)
    hashes ^= shifted.bitwise_and_((1 << 19) - 1)
    hashes *= _MULTIPLIERS[1]
    torch.bitwise_right_shift(hashes, 16, out=shifted)
    hashes ^= shifted.bitwise_and_(0xFFFF)
    return hashes
