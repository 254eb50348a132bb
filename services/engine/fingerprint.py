"""A cheap digest of a model's weights: part of the layout fingerprint (DESIGN §5), so that KV of different weights
never meets.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

_SAMPLES = 64


def weights_digest(model: nn.Module) -> str:
    """Hex, 32 digits: over names, shapes, dtypes and evenly spaced elements of all parameters, as loaded."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        flat = parameter.detach().flatten()
        index = torch.linspace(0, max(len(flat) - 1, 0), min(_SAMPLES, len(flat)), dtype=torch.float64).long()
        digest.update(flat[index.to(flat.device)].cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
