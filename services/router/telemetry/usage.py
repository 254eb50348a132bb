"""Counts what tenants use: requests by how they ended, tokens and cost, for Prometheus and in a log
to bill by.

Owns: the instruments, which tenants have series of their own, and what a line of the log says. Never: what a request is
charged (`Answer.usage`), what that costs (`TokenPrices`), or when it has ended: the intake says so, once for each
request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from services.router.telemetry.json_lines import JsonLines
from services.router.tenants.tenant import TokenUsage
from services.rpc import names

MOST_TENANTS = 200
"""How many tenants, the first that are seen, have series of their own."""
OTHERS = "_other"
"""The label that all further tenants share. No tenant has that name: theirs begin with a letter or a digit."""
_LABELS = ("tenant", "model")


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Says what one request that has ended is charged."""

    tenant: str
    """The name; empty without tenants."""
    model: str
    """Empty if it could not be read, or names no model that is served."""
    request_id: str
    """The client's name for it; perhaps empty if it was refused."""
    tokens: TokenUsage
    cost: float
    """Its unit is the currency of the tenants file."""
    outcome: str
    """The reason why it finished, or the reason of the error that refused or ended it, in lower case."""


class UsageMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._own_label: set[str] = set()
        name = names.Metric
        self._requests = Counter(
            name.TENANT_REQUESTS,
            f"Requests of tenants ended, by outcome, refusals too; tenants after the first {MOST_TENANTS} are {OTHERS}",
            (*_LABELS, "outcome"),
            registry=registry,
        )
        self._tokens = Counter(
            name.TENANT_TOKENS,
            "Tokens charged to tenants: prompt (cached ones too), cached and output",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._cost = Counter(
            name.TENANT_COST,
            "What requests of tenants cost, by the prices of their file",
            _LABELS,
            registry=registry,
        )

    def ended(self, usage: RequestUsage) -> None:
        """Counts a request. Called once for each, on the event loop."""
        tenant, model = self._label(usage.tenant), usage.model
        self._requests.labels(tenant, model, usage.outcome).inc()
        if not model:
            return  # it never came as far as to be charged
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(tenant, model, kind).inc(getattr(usage.tokens, kind))
        self._cost.labels(tenant, model).inc(usage.cost)

    def forget(self, model_id: str) -> None:
        """Removes a model's series: it is served no longer."""
        for counter in (self._requests, self._tokens, self._cost):
            counter.remove_by_labels({"model": model_id})

    def _label(self, tenant: str) -> str:
        if tenant not in self._own_label:
            if len(self._own_label) >= MOST_TENANTS:
                return OTHERS
            self._own_label.add(tenant)
        return tenant


class UsageLog:
    """Is told of requests by `ended`, on the event loop."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def ended(self, usage: RequestUsage) -> None:
        """Notes a request that has ended. It waits for nothing."""
        self._lines.put(charged(usage))


def charged(usage: RequestUsage) -> dict[str, Any]:
    """Returns the fields that say what a request is charged."""
    tokens = usage.tokens
    return {
        "tenant": usage.tenant,
        "model": usage.model,
        "request_id": usage.request_id,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "output_tokens": tokens.output,
        "cost": usage.cost,
        "outcome": usage.outcome,
    }
