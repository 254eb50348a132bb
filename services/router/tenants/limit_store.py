"""Keeps the limits of tenants for several routers in a Redis-compatible server (Redis, Valkey). Needs the extra
`redis`.

No request waits for it. Each router lets requests in by what it knows, and tells the server some times a second what
it has taken; it hears what is left of each limit, of which it may take its part until it asks again. So together they
never take more than is left, and one that is alone in asking gets all of it. While the server does not answer, each
goes on with its part of the limits. Owns: the exchange with the server, whose clock counts. Never: what a limit is
(`tenant.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.core.clock import Clock
from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.tenants.tenant import Answered, Quota, Report

log = logging.getLogger(__name__)

FLAG = "--tenants-store"
EVERY_S = 0.05
IDLE_EVERY_S = 1.0
"""Between two exchanges about a tenant that asks for nothing."""
ANSWER_WITHIN_S = 0.1
AGAIN_S = 1.0
"""After a failure."""
_PLACES_MS = 3000
"""How long a router's places count that tells no more of them: it may have been killed."""
_AT_ONCE = 256
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local me, live, most, keep = 'places:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 60000
local levels = {'0', '0'}
for index, name in ipairs({'requests', 'tokens'}) do
  local at = 4 + (index - 1) * 4
  local rate, burst, used = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  if rate > 0 then
    local level, since = redis.call('HGET', KEYS[1], name), redis.call('HGET', KEYS[1], name .. ':at')
    if level and since then
      level = tonumber(level) + math.max(0, now - tonumber(since)) * rate / 1000
    else
      level = tonumber(ARGV[at + 3]) + used
    end
    level = math.max(-burst, math.min(burst, math.min(burst, level) - used))
    levels[index] = string.format('%.6f', level)
    redis.call('HSET', KEYS[1], name, levels[index], name .. ':at', now)
    keep = math.max(keep, math.ceil((burst - level) / rate * 1000) + 60000)
  end
end
local others, routers, is_wanted = 0, 1, false
local all = redis.call('HGETALL', KEYS[1])
for index = 1, #all, 2 do
  if string.sub(all[index], 1, 7) == 'places:' and all[index] ~= me then
    local number, till, wanted = string.match(all[index + 1], '(%d+) (%d+) (%d+)')
    if tonumber(till) < now then
      redis.call('HDEL', KEYS[1], all[index])
    else
      others, routers, is_wanted = others + tonumber(number), routers + 1, is_wanted or wanted ~= '0'
    end
  end
end
local places, free = live, most - others - live
if free > 0 and (ARGV[16] == '1' or not is_wanted) then
  local part = math.floor(free / math.max(routers, tonumber(ARGV[13])))
  places = live + math.max(1, part, math.min(free, tonumber(ARGV[15])))
end
local held = math.max(places, tonumber(ARGV[14]))
redis.call('HSET', KEYS[1], me, held .. ' ' .. (now + tonumber(ARGV[12])) .. ' ' .. ARGV[15])
redis.call('PEXPIRE', KEYS[1], math.min(keep, 86400000))
return {levels[1], levels[2], places, routers}
"""
"""Settles what one router has taken of one tenant's limits, and says what is left of requests and of tokens, how many
requests this router may have at once from now on, and how many routers there are. What one may have no other may, and
what one is to have no longer only once it has told that it knows: so together they have never more, though each keeps a
free place, if there is one; but one that nobody asks keeps none while another wants several for one call. Times are the
server's, in ms."""


class LimitStore:
    """Tells the server what is taken, and quotas what is left. Run it on the event loop."""

    def __init__(self, url: str, router: str, clock: Clock, is_up: Callable[[bool], None] = lambda up: None) -> None:
        """Connects when it runs. `router` names this one, and no other start. Raises ConfigError."""
        try:
            import redis.asyncio
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigError(f"{FLAG}: needs the extra redis: pip install 'baton-serving[redis]'") from error
        self._router = router
        self._clock = clock
        self._is_up = is_up
        self._was_up: bool | None = None
        try:
            self._client: Any = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=ANSWER_WITHIN_S,
                socket_connect_timeout=ANSWER_WITHIN_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                max_connections=2,
            )
        except (ValueError, redis.RedisError) as error:
            raise ConfigError(
                f"{FLAG}: it is not the URL of a Redis-compatible server, as redis://HOST:6379/0"
            ) from error

    async def run(self, quotas: Callable[[], Iterable[Quota]]) -> None:
        """Exchanges until it is cancelled. `quotas` returns those of all tenants that have had a request."""
        task = asyncio.current_task()
        assert task is not None
        try:
            # Python 3.11's wait_for, which the client uses, may swallow that the task is cancelled.
            while not task.cancelling():
                now = self._clock.now()
                due = [quota for quota in quotas() if quota.is_due(now, EVERY_S * 0.9, IDLE_EVERY_S)]
                due.sort(key=lambda quota: quota.told_s)
                worked = await self._exchange(due[:_AT_ONCE]) if due else True
                await asyncio.sleep(EVERY_S if worked else AGAIN_S)
        finally:
            await self._client.aclose()

    async def _exchange(self, quotas: Sequence[Quota]) -> bool:
        """Returns whether the server has answered about all of them as it should."""
        reports = [quota.report(self._clock.now()) for quota in quotas]
        answers: list[Answered | None] = [None] * len(reports)
        why = "an answer is none"
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S), self._client.pipeline(transaction=False) as pipeline:
                for report in reports:
                    pipeline.execute_command(
                        "EVAL", _SCRIPT, 1, f"baton:limits:{{{report.tenant}}}", *self._told(report)
                    )
                found = await pipeline.execute(raise_on_error=False)
            answers = [_answered(each, report) for each, report in zip(found, reports, strict=True)]
            why = next((str(each) for each in found if isinstance(each, Exception)), why)
        except Exception as error:  # over bytes that are no answer the client raises all kinds of errors
            why = str(error) or type(error).__name__
        now = self._clock.now()
        for quota, report, answer in zip(quotas, reports, answers, strict=True):
            if answer is None:
                quota.untold(report)
            else:
                quota.follow(report, answer, now)
        worked = None not in answers
        self._say(worked, why)
        return worked

    def _told(self, report: Report) -> list[object]:
        limits = [(bucket.rate_per_s, bucket.burst, bucket.used, bucket.level) for bucket in report.buckets]
        numbers = [number for bucket in limits for number in bucket]
        most = -1 if report.most_live is None else report.most_live
        last = report.num_routers, report.num_held, report.num_wanted, int(report.is_asked)
        return [self._router, report.num_live, most, *map(repr, numbers), _PLACES_MS, *last]

    def _say(self, worked: bool, why: str) -> None:
        if worked is self._was_up:
            return
        if not worked:
            text = "%s: the server does not answer as it should (%s): each router goes on with its part of the limits"
            log.error(text, FLAG, printable(why[:200]))
        elif self._was_up is not None:
            log.warning("%s: the server answers again: limits are shared", FLAG)
        self._was_up = worked
        self._is_up(worked)


def _answered(found: Any, report: Report) -> Answered | None:
    """Returns what the server says, or None if it cannot be."""
    try:
        levels = tuple(float(each) for each in found[:2])
        places, routers = (int(each) for each in found[2:])
    except (TypeError, ValueError, IndexError):
        return None
    fits = all(
        math.isfinite(level) and (not bucket.rate_per_s or abs(level) <= bucket.burst * 1.001)
        for level, bucket in zip(levels, report.buckets, strict=True)
    )
    most = report.num_live + (report.most_live or 0)
    if not fits or not 0 <= places <= most or not 1 <= routers <= 1 << 16:
        return None
    return Answered(levels, places, routers)
