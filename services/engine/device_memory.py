"""How full an accelerator's memory is. Owns nothing; reads what torch knows. The host's memory is not its business."""

from __future__ import annotations

import torch


def device_memory(name: str) -> dict[str, int]:
    """Bytes: what this process's tensors take, what torch keeps for it, what is free on the device, and all of it.
    Empty for the CPU, whose memory is the process's."""
    device = torch.device(name)
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "free": free,
        "total": total,
    }
