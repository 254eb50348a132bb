"""Names what commands show of workers: what blocks are used for, and what a worker of some roles is called. Pure."""

from __future__ import annotations

from collections.abc import Sequence

CLASSES = ("importing", "leased", "active", "cached", "free")
"""The classes of a pool's ledger, in the order in which they are shown."""


def role_of(roles: Sequence[str]) -> str:
    """Returns what a worker with these roles is called: `baton mixed` starts one with both."""
    return "mixed" if len(roles) > 1 else str(roles[0]) if roles else "-"
