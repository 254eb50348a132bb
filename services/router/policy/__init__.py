"""Has the placement policy. Every module is pure; the simulator runs it unchanged.

Owns: the views policy may look at, the filters and the scores, and how far workers are trusted (`health`). Never:
requests, clocks, I/O.
"""

from services.router.policy.cluster import (
    Cluster,
    WorkerSubset,
    nearest_start,
    nearest_to_room,
    place_decode,
    place_park,
    place_prefill,
    resolve_max_tokens,
    shortest_queue,
)
from services.router.policy.explanation import (
    PlacedPhase,
    PlacementChoice,
    Ranking,
    SplitAfterAll,
    Unsplit,
    VainAttempt,
    explain_choice,
)
from services.router.policy.filter import (
    LeftOut,
    LeftOutWorkers,
    WhyNot,
    can_decode,
    can_take_over,
    decode_shortage,
    park_shortage,
    sift,
)
from services.router.policy.forecast import Ahead, Costs, Forecast, Work
from services.router.policy.handoff_room import beside_handoffs
from services.router.policy.handoff_time import HandoffTime
from services.router.policy.known_cache import (
    BringTime,
    BringTimes,
    KnownCache,
    PrefixBreakEven,
    PrefixOffer,
    PrefixOutcome,
    PrefixSource,
    WhyComputed,
    choose_source,
    prefix_break_even,
)
from services.router.policy.prefix_index import PrefixIndex
from services.router.policy.presets import PRESETS, preset
from services.router.policy.selection import Chosen, Selection
from services.router.policy.shares import Share, Shares
from services.router.policy.splitting import (
    DEFAULT_SPLIT,
    BreakEven,
    Split,
    SplitCosts,
    WhySplit,
    WhyUnsplit,
    break_even,
    split_costs,
)
from services.router.policy.terms import PARK_TERMS, SHARING, PolicyConfig, Term, sharing, weighted
from services.router.policy.views import (
    Fingerprint,
    HandoffsInFlight,
    Job,
    Load,
    Role,
    Source,
    WorkerView,
    uncached_tokens,
)

__all__ = [
    "DEFAULT_SPLIT",
    "PARK_TERMS",
    "PRESETS",
    "SHARING",
    "Ahead",
    "BreakEven",
    "BringTime",
    "BringTimes",
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
    "PrefixBreakEven",
    "PrefixIndex",
    "PrefixOffer",
    "PrefixOutcome",
    "PrefixSource",
    "Ranking",
    "Role",
    "Selection",
    "Share",
    "Shares",
    "Source",
    "Split",
    "SplitAfterAll",
    "SplitCosts",
    "Term",
    "Unsplit",
    "VainAttempt",
    "WhyComputed",
    "WhyNot",
    "WhySplit",
    "WhyUnsplit",
    "Work",
    "WorkerSubset",
    "WorkerView",
    "beside_handoffs",
    "break_even",
    "can_decode",
    "can_take_over",
    "choose_source",
    "decode_shortage",
    "explain_choice",
    "nearest_start",
    "nearest_to_room",
    "park_shortage",
    "place_decode",
    "place_park",
    "place_prefill",
    "prefix_break_even",
    "preset",
    "resolve_max_tokens",
    "sharing",
    "shortest_queue",
    "sift",
    "split_costs",
    "uncached_tokens",
    "weighted",
]
