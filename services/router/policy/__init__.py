"""Has the placement policy. Every module is pure; the simulator runs it unchanged.

Owns: the views policy may look at, the filters and the scores, and how far workers are trusted (`health`). Never:
requests, clocks, I/O.
"""

from services.router.policy.cluster import Cluster, WorkerSubset, can_decode, can_prefill, can_take_over
from services.router.policy.explanation import (
    LeftOut,
    LeftOutWorkers,
    PlacedPhase,
    PlacementChoice,
    Ranking,
    Unsplit,
    VainAttempt,
    WhyNot,
    explain_choice,
)
from services.router.policy.forecast import Ahead, Costs, Forecast, Work
from services.router.policy.handoff_time import HandoffTime
from services.router.policy.known_cache import KnownCache
from services.router.policy.placement import (
    left_out_of_decode,
    left_out_of_start,
    nearest_start,
    nearest_to_room,
    place_decode,
    place_prefill,
    resolve_max_tokens,
    shortest_queue,
)
from services.router.policy.presets import PRESETS, preset
from services.router.policy.selection import Chosen, Selection
from services.router.policy.splitting import (
    DEFAULT_SPLIT,
    BreakEven,
    Split,
    SplitCosts,
    WhyWhole,
    break_even,
    split_costs,
)
from services.router.policy.terms import PolicyConfig, Term, weighted
from services.router.policy.views import Fingerprint, HandoffsInFlight, Job, Load, Role, Source, WorkerView

__all__ = [
    "DEFAULT_SPLIT",
    "PRESETS",
    "Ahead",
    "BreakEven",
    "Chosen",
    "Cluster",
    "Costs",
    "Fingerprint",
    "Forecast",
    "HandoffTime",
    "HandoffsInFlight",
    "Job",
    "KnownCache",
    "LeftOut",
    "LeftOutWorkers",
    "Load",
    "PlacedPhase",
    "PlacementChoice",
    "PolicyConfig",
    "Ranking",
    "Role",
    "Selection",
    "Source",
    "Split",
    "SplitCosts",
    "Term",
    "Unsplit",
    "VainAttempt",
    "WhyNot",
    "WhyWhole",
    "Work",
    "WorkerSubset",
    "WorkerView",
    "break_even",
    "can_decode",
    "can_prefill",
    "can_take_over",
    "explain_choice",
    "left_out_of_decode",
    "left_out_of_start",
    "nearest_start",
    "nearest_to_room",
    "place_decode",
    "place_prefill",
    "preset",
    "resolve_max_tokens",
    "shortest_queue",
    "split_costs",
    "weighted",
]
