"""Placement policy (DESIGN §8). Every module here is pure; the simulator runs it unchanged.

Owns: the views policy may look at, the filters and the scores. Never: state, clocks, I/O.
"""

from services.router.policy.forecast import Ahead, Costs, Forecast, Work
from services.router.policy.placement import (
    can_decode,
    can_hand_over,
    can_prefill,
    can_take_over,
    nearest_to_room,
    place_decode,
    place_prefill,
    resolve_max_tokens,
)
from services.router.policy.terms import PolicyConfig, Term
from services.router.policy.views import Job, Load, Role, Source, WorkerView

__all__ = [
    "Ahead",
    "Costs",
    "Forecast",
    "Job",
    "Load",
    "PolicyConfig",
    "Role",
    "Source",
    "Term",
    "Work",
    "WorkerView",
    "can_decode",
    "can_hand_over",
    "can_prefill",
    "can_take_over",
    "nearest_to_room",
    "place_decode",
    "place_prefill",
    "resolve_max_tokens",
]
