"""Keeps the coordinator's bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.policy import DEFAULT_SPLIT, PolicyConfig, Split
from services.router.policy.filter import LongPromptConfig
from services.router.policy.health import HealthConfig
from services.router.policy.outliers import OutlierConfig


@dataclass(frozen=True)
class CoordinatorConfig:
    model_context_tokens: int
    """The model's longest sequence, in tokens; it is the bound while no worker is known."""
    vocab_size: int = 1 << 31
    """A worker's token beyond it is a protocol error; it must not reach other workers in a replay."""
    max_queue: int = 1024
    """Requests that may wait for a first placement."""
    queue_timeout_s: float = 120.0
    """Longest wait for a busy worker, here or in the worker's own queue."""
    no_worker_timeout_s: float = 30.0
    """Longest wait while no ready worker could serve the request at all."""
    max_crashes: int = 3
    """A request ends after this many worker failures under it without progress."""
    max_fruitless_starts: int = 32
    """A request ends after its prompt was computed this many times in a row without a new token, whatever the reasons
    were: drains, refusals and lost sessions are no crashes, and would otherwise have no bound."""
    replay_across_engines: bool = False
    """Whether a stream goes on with a worker of another engine if none that is like the one that began it could."""
    last_chance_pause_s: float = 1.0
    """The pause before a request is placed again that one more loss would end. Within this time workers that were lost
    together, a rack for instance, are noticed, so that one fault does not use up all the request's attempts."""
    overtake_limit_s: float = 1.0
    """A request that has waited longer is not overtaken."""
    aging_s: float = 10.0
    """A request that has waited longer is served within a bound, whatever its priority: see `turn_every`."""
    turn_every: int = 4
    """One start in this many is a turn of those that have waited `aging_s`. And a prompt that has waited that long at
    its worker is overtaken by one fewer prompts than these before the worker begins it."""
    max_overtaken: int = 16
    """How far past the queue's unplaceable head a placement looks."""
    refusal_backoff_s: float = 0.02
    """The pause before a worker that refused is asked again; it doubles with each refusal."""
    max_refusal_backoff_s: float = 0.5
    """The longest such pause. It is below the 2 s for which a worker keeps room for an aged handoff that it refused."""
    answer_timeout_s: float = 10.0
    """A worker admits or refuses a handoff at once; if it does neither within this time, the leg has failed. So has a
    leg of which nothing is heard within this time while its worker has nothing to do."""
    compute_margin: float = 10.0
    """A leg of which nothing is heard is given up after `queue_timeout_s` plus this many times the time that its worker
    needs, by the worker's own figures, for the prompt tokens before it and its own."""
    park_after_s: float = 0.1
    """How long a sealed handoff waits for a decode worker with room before it goes to a store: most find room."""
    orphan_timeout_s: float = 2.0
    """How long a decode leg, or a store's, whose source is gone may take to say whether it had everything."""
    max_failed_imports: int = 2
    """After this many failed imports of one lease, the prompt is computed again."""
    max_workers: int = 1024
    """The most workers known at once, lost ones included."""
    forget_worker_s: float = 300.0
    deadline_margin: float = 2.0
    """A deadline is refused in advance if the work before it would take this many times the time that is left."""
    crowded_factor: float = 1.5
    """The cluster is crowded, for a request, if others make it take this many times as long as alone. Then it is
    refused if it is expected, by averages instead of bounds, to miss its deadline."""
    retry_after_s: float = 1.0
    """The time after which refused clients are told to try again."""
    step_timeout_s: float = 30.0
    """A device step that runs longer is stuck, and its worker with it, however well its heartbeats come."""
    canary_timeout_s: float = 10.0
    canary_salt: str = "canary"
    """The beginning of the canaries' cache salts. No other process may use the same: blocks that another router's
    canary left in a prefix cache would be found instead of copied, and the canary would not check the transfer."""
    long_prompts: LongPromptConfig = field(default_factory=LongPromptConfig)
    outliers: OutlierConfig = field(default_factory=OutlierConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    split: Split = DEFAULT_SPLIT
    """Which prompts run apart from their decodes, where both ways are open."""
