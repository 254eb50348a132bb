"""Raises the limit on this process's file descriptors, and says how many of them a listener may use.

A process without free descriptors can accept no connection, open no file and dial no worker, so limits on connections
must be lower than the limit on descriptors.
"""

from __future__ import annotations

import resource

_ENOUGH_DESCRIPTORS = 1 << 16
"""Number of descriptors that is enough for all limits on connections; asked for where the system has no limit."""


def raise_descriptor_limit() -> None:
    """Raises the limit as far as the system allows, at most to 65536. A process often starts with a limit of 1024, for
    programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def share_of_descriptors(share: float, most: int) -> int:
    """Returns `share` times the number of descriptors that the process may have now, at least 8 and at most `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(8, min(most, int(soft * share)))
