"""Says how much memory this process has used.

Owns: reading the kernel's figure of one program. That of `getrusage` is another: its `ru_maxrss` begins with what the
process had that started this program, so a large parent hides what a small child takes (getrusage(2), NOTES).
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory_bytes() -> int:
    """Returns the most memory, in bytes, that this process had resident since its program started. Where the kernel
    keeps no such figure, it is that of `getrusage`."""
    status = _STATUS.read_text() if _STATUS.exists() else ""
    if (found := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)) is not None:
        return int(found[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
