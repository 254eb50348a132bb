"""Provides what tests have of the cluster token: one for all of them, and channels that carry it."""

from __future__ import annotations

import functools

from services.rpc import channels

CLUSTER_TOKEN = "a-token-of-the-tests"
dial = functools.partial(channels.dial, token=CLUSTER_TOKEN)
"""As a process of the cluster dials. Who is to come as a stranger dials with `services.rpc.channels`."""
