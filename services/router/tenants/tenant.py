"""Defines a tenant: its keys, its limits, and what separates it from other tenants; and keeps what it has used. Pure.

Owns: the tenant's two buckets and the number of its live requests. A request enters (one request, one place), reserves
the tokens of its prompt and the most that its output can have, and leaves: what it has not used is given back then.
Never: which tenant a request is of, or a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.core.errors import InvalidRequest, ModelNotAllowed, QuotaExceeded

PRIORITIES = (-100, 100)
"""The priorities that a request may have at all."""


_HARDLY_ANY = 1e-6
"""So much less than what is asked for is rounding."""


class TokenBucket:
    """Fills at a rate up to its burst. Units are taken from it, and given back.

    Of a clock that jumps back it takes the new time and fills by nothing, so a jump neither grants units nor stops the
    filling until the old time is reached again.
    """

    __slots__ = ("_at_s", "_level", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        """It is full at first. Both numbers are positive."""
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = float(burst)
        self._at_s = now

    def level(self, now: float) -> float:
        """Returns how many units are there; fewer than none if more were used than had been taken."""
        elapsed_s, self._at_s = max(0.0, now - self._at_s), now
        self._level = min(self.burst, self._level + elapsed_s * self.rate_per_s)
        return self._level

    def wait_s(self, units: float, now: float) -> float:
        """Returns in how many seconds the units are there, if nobody takes any; 0 if they are there now."""
        missing = min(units, self.burst) - self.level(now)
        return missing / self.rate_per_s if missing > _HARDLY_ANY else 0.0

    def take(self, units: float, now: float) -> None:
        """Takes units, also those that are not there: ask `wait_s` first."""
        self._level = self.level(now) - units

    def give_back(self, units: float, now: float) -> None:
        """Returns units that were taken and not used, as far as there is room for them."""
        self._level = min(self.burst, self.level(now) + units)

    def become(self, units: float, now: float) -> None:
        """Has this number of units from now on, as far as there is room for them."""
        self._at_s, self._level = now, min(self.burst, units)

    def change(self, rate_per_s: float, burst: float, now: float) -> None:
        """Takes another rate and burst from now on. A larger burst is not there at once, but filled."""
        self._level = min(burst, self.level(now))
        self.rate_per_s, self.burst = rate_per_s, burst


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


REQUESTS_PER_S, TOKENS_PER_MIN, CONCURRENT_REQUESTS = "requests_per_s", "tokens_per_min", "concurrent_requests"
"""Names of limits, as the file and errors have them."""
_MINUTE_S = 60.0
_AWAY_S = 2.5
"""How long a store may be silent before it is away."""
_ASKED_S = 1.0
_WANTED_S = 2.0
"""How long places are kept for a call of several requests that was refused: its client asks again, or does not."""


@dataclass(frozen=True, slots=True)
class BucketReport:
    """Says what was taken of one rate since it was told before; of a limit that there is not, the rate is 0."""

    rate_per_s: float = 0.0
    """The tenant's, and so is the burst."""
    burst: float = 0.0
    used: float = 0.0
    """Below 0 if more was given back than taken."""
    level: float = 0.0
    """What this router takes for what is left of the whole, if nobody else knows."""


@dataclass(frozen=True, slots=True)
class Report:
    """Says what a router has taken of a tenant's limits."""

    tenant: str
    buckets: tuple[BucketReport, BucketReport]
    """One for requests, one for tokens."""
    num_live: int
    num_held: int
    """Requests that it may come to have until it hears the answer."""
    num_wanted: int
    """Requests that came in one call, and were refused lately for want of places."""
    is_asked: bool
    """Whether a request came in the last second."""
    most_live: int | None
    num_routers: int
    """Among which the limits are divided, as far as this one knows."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Says what is left of a tenant's limits over all routers, once a report is settled."""

    levels: tuple[float, ...]
    """One for requests, one for tokens."""
    num_places: int
    """Requests that this router may have at once."""
    num_routers: int
    """Those that have told of this tenant lately."""


class Quota:
    """Holds a router's part of a tenant's limits: all of them, or one of `num_routers` equal parts.

    A request that needs more than a part's burst, and no more than the tenant's, waits for a full part and leaves it in
    debt, so the rate holds.
    """

    def __init__(self, tenant: Tenant, now: float, num_routers: int = 1) -> None:
        self._name = tenant.name
        self._limits = tenant.limits
        self._num_routers = num_routers
        self.num_live = 0
        self.num_arriving = 0
        """Requests whose bodies are being read."""
        self._used = [0.0, 0.0]
        """What was taken of each bucket since `report`."""
        self._places = 0
        self._places_until_s = -math.inf
        """Until when a store's word counts for how many requests there may be at once."""
        self._wanted = 0
        self._wanted_until_s = -math.inf
        self.told_s = self._asked_s = -math.inf
        """When a store was told of it, and when it was asked for something."""
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change(tenant.limits, now)

    def change(self, limits: TenantLimits, now: float) -> None:
        """Takes other limits from now on. What is used stays used."""
        self._limits = limits
        self._requests = self._changed(self._requests, *_requests_of(limits), now)
        self._tokens = self._changed(self._tokens, *_tokens_of(limits), now)

    def divide(self, num_routers: int, now: float) -> None:
        """Takes another part of the limits from now on. A larger one is not there at once, but fills."""
        self._num_routers = num_routers
        self.change(self._limits, now)

    def _changed(
        self, bucket: TokenBucket | None, rate_per_s: float | None, burst: int, now: float
    ) -> TokenBucket | None:
        """Returns the bucket with this part of that rate and burst, a full one if there was none; None for no limit."""
        if rate_per_s is None:
            return None
        part = rate_per_s / self._num_routers, burst / self._num_routers
        if bucket is None:
            return TokenBucket(*part, now)
        bucket.change(*part, now)
        return bucket

    def demand(self, now: float) -> None:
        """Raises QuotaExceeded if not one more request may come in now, beside those whose bodies are being read."""
        self._asked_s = now
        self._demand_places(1, now, num_others=self.num_arriving)
        if self._requests is not None:
            self._demand(REQUESTS_PER_S, self._requests, 1, now)

    def enter(self, now: float, num_requests: int = 1) -> None:
        """Counts requests that have come in one call. Raises QuotaExceeded, and then counts none.

        Without a token left they are refused here, before their prompts cost anything.
        """
        self._asked_s = now
        self._demand_places(num_requests, now)
        if self._tokens is not None:
            self._demand(TOKENS_PER_MIN, self._tokens, 1, now)
        if self._requests is not None:
            self._demand(REQUESTS_PER_S, self._requests, num_requests, now)
            self._requests.take(num_requests, now)
            self._used[0] += num_requests
        self.num_live += num_requests

    def reserve(self, num_tokens: int, now: float) -> int:
        """Takes the tokens that a request may come to have, and returns how many were taken: none without a limit.

        Raises QuotaExceeded, and then takes none.
        """
        if self._tokens is not None:
            self._demand(TOKENS_PER_MIN, self._tokens, num_tokens, now)
            self._tokens.take(num_tokens, now)
            self._used[1] += num_tokens
        return 0 if self._tokens is None else num_tokens

    def leave(self, num_reserved: int, num_used: int, now: float, num_requests: int = 1) -> None:
        """Counts requests out, and settles their tokens."""
        self.num_live -= num_requests
        if self._tokens is not None and num_reserved:  # else they were not taken: there was no limit then
            self._tokens.give_back(num_reserved - num_used, now)
            self._used[1] -= num_reserved - num_used

    # What a store is told, and what it says

    def is_due(self, now: float, every_s: float, idle_every_s: float) -> bool:
        """Returns whether a store is to be told: soon of a tenant that asks for something, else now and then, and not
        at all of one that has been quiet for a minute."""
        is_busy = bool(self.num_live) or any(self._used) or now - self._asked_s < idle_every_s
        if not is_busy and now - self._asked_s > _MINUTE_S:
            return False
        return now - self.told_s >= (every_s if is_busy else idle_every_s)

    def report(self, now: float) -> Report:
        """Returns what was taken since the last report that was followed."""
        was_away = now - self.told_s > _AWAY_S
        self.told_s = now
        buckets = []
        for index, bucket in enumerate((self._requests, self._tokens)):
            used, self._used[index] = self._used[index], 0.0
            if bucket is None:
                buckets.append(BucketReport())
                continue
            level = bucket.level(now)
            if was_away:  # what was taken long ago has come again, here as there
                used = min(used, bucket.burst - level)
            whole = self._num_routers
            buckets.append(BucketReport(bucket.rate_per_s * whole, bucket.burst * whole, used, level * whole))
        most = self._limits.concurrent_requests
        held = 0 if most is None else self._part_of_places(most, now)
        return Report(
            self._name,
            (buckets[0], buckets[1]),
            self.num_live,
            max(held, self.num_live),
            self._wanted if now < self._wanted_until_s else 0,
            now - self._asked_s < _ASKED_S,
            most,
            self._num_routers,
        )

    def untold(self, report: Report) -> None:
        """Takes a report back that perhaps nobody has heard. What was given back is forgotten: to give it back twice
        would grant it twice."""
        self.told_s = -math.inf
        for index, bucket in enumerate(report.buckets):
            self._used[index] += max(0.0, bucket.used)

    def follow(self, report: Report, answered: Answered, now: float) -> None:
        """Takes this router's part of what is left."""
        num_routers = max(self._num_routers, answered.num_routers)
        for index, bucket in enumerate((self._requests, self._tokens)):
            if bucket is not None and report.buckets[index].rate_per_s:
                bucket.become(answered.levels[index] / num_routers - self._used[index], now)
        self._places, self._places_until_s = answered.num_places, now + _AWAY_S

    def _is_told(self, now: float) -> bool:
        """Returns whether a store's word counts for requests at once."""
        return now < self._places_until_s

    def _part_of_places(self, most: int, now: float) -> int:
        return min(self._places, most) if self._is_told(now) else max(1, most // self._num_routers)

    def _demand_places(self, number: int, now: float, *, num_others: int = 0) -> None:
        most = self._limits.concurrent_requests
        if most is None:
            return
        part = self._part_of_places(most, now)
        if number > 1 and not self.num_live and not self._is_told(now):
            part = max(part, number)  # a call of more than a part comes in when nothing else is there: else never
        if self.num_live + num_others + number > part:
            if number > 1:  # a store gives more than a part, if they are free, when it is told
                self._wanted, self._wanted_until_s = number, now + _WANTED_S
            raise QuotaExceeded(
                f"tenant {self._name} has {self.num_live} requests at once, and may have {part}{self._of_routers()}",
                subject=self._name,
                limit=CONCURRENT_REQUESTS,
            )

    def _demand(self, limit: str, bucket: TokenBucket, units: int, now: float) -> None:
        wait_s = bucket.wait_s(units, now)
        if wait_s <= 0:
            return
        allowed = getattr(self._limits, limit)
        raise QuotaExceeded(
            f"tenant {self._name} has reached its {limit}: limit {allowed:.15g}{self._of_routers()}, "
            f"requested {units}, left {max(0, int(bucket.level(now)))}; try again in {wait_s:.3g} s",
            subject=self._name,
            limit=limit,
            retry_after_s=wait_s,
        )

    def _of_routers(self) -> str:
        return f" (over {self._num_routers} routers)" if self._num_routers > 1 else ""


def demand_together(tenant: Tenant, num_prompts: int) -> None:
    """Raises InvalidRequest if the prompts of one call could never be let in together."""
    limits = tenant.limits
    most = [(limits.concurrent_requests, CONCURRENT_REQUESTS)]
    if limits.requests_per_s is not None:
        most.append((limits.burst_requests, "burst_requests"))
    for bound, limit in most:
        if bound is not None and num_prompts > bound:
            raise InvalidRequest(
                "prompt", f"has {num_prompts} prompts; tenant {tenant.name} may have {bound} together ({limit})"
            )


def demand_tokens_together(tenant: Tenant, num_tokens: int) -> None:
    """Raises InvalidRequest if the tokens of one call's prompts and answers could never be let in together."""
    limits = tenant.limits
    if limits.tokens_per_min is not None and num_tokens > limits.burst_tokens:
        raise InvalidRequest(
            "prompt",
            f"brings the tokens of all prompts of this call, with their answers, to {num_tokens}; tenant {tenant.name} "
            f"may have {limits.burst_tokens} together (burst_tokens)",
        )


def allowed_output(
    tenant: Tenant,
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    num_answers: int,
    room: int,
    is_default: bool = False,
) -> int | None:
    """Returns the max_tokens of a request's answers: what it asks for, or if it asks for nothing what the tenant's
    limits and the context, with `room` tokens beside the prompt, leave. None if no limit speaks of it. `is_default`
    says that it is not the client who asks for them: then they may be fewer.

    Raises InvalidRequest for what would not be allowed at any time.
    """
    limits, most = tenant.limits, None
    if limits.max_input_tokens is not None and num_prompt_tokens > limits.max_input_tokens:
        raise InvalidRequest(
            "prompt", f"has {num_prompt_tokens} tokens; tenant {tenant.name} may have {limits.max_input_tokens}"
        )
    if limits.max_output_tokens is not None:
        most = limits.max_output_tokens
    if limits.tokens_per_min is not None:
        left = (limits.burst_tokens - num_prompt_tokens) // num_answers
        if left < 1:
            raise InvalidRequest(
                "prompt",
                f"has {num_prompt_tokens} tokens; with its output it may have {limits.burst_tokens}, which is all that "
                f"tenant {tenant.name} may use at once",
            )
        most = left if most is None else min(most, left)
    if most is None:
        return max_tokens
    if max_tokens is None:
        return max(1, min(most, room))
    if max_tokens > most and is_default:
        return most
    if max_tokens > most:
        raise InvalidRequest(
            "stopping.max_tokens", f"is {max_tokens}; tenant {tenant.name} may have {most} with this prompt"
        )
    return max_tokens


def _requests_of(limits: TenantLimits) -> tuple[float | None, int]:
    return limits.requests_per_s, limits.burst_requests


def _tokens_of(limits: TenantLimits) -> tuple[float | None, int]:
    per_min = limits.tokens_per_min
    return None if per_min is None else per_min / _MINUTE_S, limits.burst_tokens
