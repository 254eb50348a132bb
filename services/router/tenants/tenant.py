"""Defines a tenant: its keys, its limits, and what separates it from other tenants. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.errors import InvalidRequest, ModelNotAllowed

PRIORITIES = (-100, 100)
"""The priorities that a request may have at all."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Is what is known of a key: enough to recognise it, and not enough to make it."""

    key_id: str
    digest: bytes
    """The SHA-256 of the whole key."""
    expires_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Says how much a tenant may use. None means no limit of the tenant's own."""

    requests_per_s: float | None = None
    burst_requests: int = 1
    """Requests at once after a quiet time."""
    tokens_per_min: int | None = None
    """Counts prompts and outputs together."""
    burst_tokens: int = 1
    """Tokens at once after a quiet time: also the most that one request may have."""
    concurrent_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    """The most that one answer may have."""


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Counts the tokens that one request is charged: none until a worker has begun."""

    prompt: int = 0
    """Those of the prompt, once for all of its answers, the cached ones too."""
    cached: int = 0
    """Those of the prompt that were found in a cache."""
    output: int = 0
    """Those of all answers."""

    @property
    def total(self) -> int:
        """Returns how many count in limits: cached ones do."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Says what 1,000 tokens cost, in a currency that the operator knows."""

    prompt: float = 0.0
    cached: float = 0.0
    """The price of prompt tokens that were found in a cache."""
    output: float = 0.0

    def cost(self, usage: TokenUsage) -> float:
        """Returns what a request costs, in the prices' currency. Each prompt token has one of the two prices."""
        computed = usage.prompt - usage.cached
        return (computed * self.prompt + usage.cached * self.cached + usage.output * self.output) / 1000


@dataclass(frozen=True, slots=True)
class Tenant:
    """Describes one tenant, as the file does."""

    name: str
    """Empty for whoever asks a router without tenants."""
    keys: tuple[ApiKey, ...] = ()
    limits: TenantLimits = TenantLimits()
    models: frozenset[str] | None = None
    """Models that it may use; None for all."""
    priorities: tuple[int, int] = PRIORITIES
    weight: float = 1.0
    cache_namespace: str = ""
    """Tenants of the same namespace share prefixes; empty means one of its own."""
    prices: TokenPrices = TokenPrices()
    logs_prompts: bool = True
    """Whether --log-prompts, and the request log, show its prompts and answers too."""

    def may_use(self, model_id: str) -> bool:
        return self.models is None or model_id in self.models

    def demand_model(self, model_id: str) -> None:
        """Raises ModelNotAllowed, in the same words for a model that is served and for one that is not."""
        if not self.may_use(model_id):
            raise ModelNotAllowed(f"tenant {self.name} does not have access to model {model_id!r}")

    def salt(self, cache_salt: str) -> str:
        """Returns what block hashes begin with, for a request that gives `cache_salt`.

        No two namespaces have a salt in common, nor has one with a router without tenants or with its canaries: neither
        names nor salts of clients contain the NUL that ends a namespace here.
        """
        if not self.name:
            return cache_salt
        namespace = f"shared:{self.cache_namespace}" if self.cache_namespace else f"tenant:{self.name}"
        return f"{namespace}\0{cache_salt}"

    def scoped(self, request_id: str) -> str:
        """Returns the label by which operators find a request. Names of tenants contain no slash."""
        return f"{self.name}/{request_id}" if self.name else request_id

    def priority(self, asked: int | None) -> int:
        """Returns the priority of a request that asks for it, or for None the allowed one that is nearest to 0. Raises
        InvalidRequest."""
        lowest, highest = self.priorities
        if asked is None:
            return min(max(0, lowest), highest)
        if not lowest <= asked <= highest:
            raise InvalidRequest("priority", f"is {asked}; tenant {self.name} may have {lowest} to {highest}")
        return asked


OPEN = Tenant("")
"""Is whoever asks a router without tenants: one caller, without limits."""
