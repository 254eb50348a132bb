"""The coordinator's bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.router.health import HealthConfig
from services.router.policy import PolicyConfig


@dataclass(frozen=True)
class CoordinatorConfig:
    model_context_tokens: int
    """The model's longest sequence; speaks while no worker is known."""
    vocab_size: int = 1 << 31
    """A worker's token beyond it is a protocol error; it must not reach other workers in a replay."""
    max_queue: int = 1024
    """Requests that may wait for a first placement."""
    queue_timeout_s: float = 120.0
    """Longest wait for a busy worker, here or in the worker's own queue."""
    no_worker_timeout_s: float = 30.0
    """Longest wait while no ready worker could serve the request at all."""
    max_crashes: int = 3
    """Worker failures under one request, without progress, that end it."""
    last_chance_pause_s: float = 1.0
    """Before a request is placed again that one more loss would end: workers that were lost together, a whole rack of
    them, are noticed within this time, and one fault must not spend all its chances."""
    overtake_limit_s: float = 1.0
    """A request that has waited longer is not overtaken."""
    max_overtaken: int = 16
    """How far past the queue's unplaceable head a placement looks."""
    refusal_backoff_s: float = 0.02
    """Before the same worker is asked again; doubles with each refusal."""
    max_refusal_backoff_s: float = 0.5
    """Below the 2 s for which a worker keeps room for an aged handoff it refused."""
    answer_timeout_s: float = 10.0
    """A handoff is admitted or refused at once; a worker that does neither for so long has failed it. So has one that
    says nothing of a leg for so long while it works on nothing at all."""
    compute_margin: float = 10.0
    """A leg of which nothing is heard is given up after `queue_timeout_s` and so many times as long as its worker needs
    for the prompt tokens before it and its own, by the worker's own figures."""
    orphan_timeout_s: float = 2.0
    """How long a decode leg whose source is gone may take to say whether it had everything."""
    max_failed_imports: int = 2
    """Of one lease; then the prompt is computed again."""
    max_workers: int = 1024
    """Known at once, lost ones too."""
    forget_worker_s: float = 300.0
    deadline_margin: float = 2.0
    """A deadline is refused in advance if the work before it would take so many times the time that is left."""
    crowded_factor: float = 1.5
    """The cluster is busy, for a request, if others make it take so many times longer than alone. Then what is expected
    to miss its deadline is refused, by averages instead of bounds."""
    retry_after_s: float = 1.0
    """What refused clients are told."""
    step_timeout_s: float = 30.0
    """A device step that runs longer is stuck, and its worker with it, however well its heartbeats come."""
    canary_timeout_s: float = 10.0
    canary_salt: str = "canary"
    """Begins the cache salts of canaries. Of this process alone: what another router's canary left in a worker's prefix
    cache would be found instead of moved, and a transfer that moves nothing shows nothing."""
    health: HealthConfig = field(default_factory=HealthConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)

    @property
    def soonest_silence_s(self) -> float:
        """No leg is given up for its silence sooner, as long as its source is there."""
        return min(self.answer_timeout_s, self.queue_timeout_s)
