"""Provides what tests have of the cluster token: one for all of them, and channels that carry it."""

from __future__ import annotations

import functools

from services.rpc import channels
from services.rpc.membership import MTLS, MembershipConfig

CLUSTER_TOKEN = "a-token-of-the-tests"
dial = functools.partial(channels.dial, token=CLUSTER_TOKEN)
"""As a process of the cluster dials. Who is to come as a stranger dials with `services.rpc.channels`."""


def cluster_token_of(config: MembershipConfig) -> str | None:
    """Returns the token that a process with this configuration has."""
    return None if config.cluster_auth == MTLS else CLUSTER_TOKEN
