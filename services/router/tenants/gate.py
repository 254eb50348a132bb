"""Lets callers in: it knows the tenants of this moment, whose key is whose, and what each has used.

Owns: the tenants file on its way from the disk, at the start and while the router runs, and each tenant's quota. A file
that cannot be taken changes nothing: the tenants that were read before stay. A request that was let in keeps its place
whatever the file says next. Never: what a file may say (`tenants_file.py`), or how a front asks for a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.core.clock import Clock
from services.core.errors import ConfigError, InvalidKey
from services.core.file_stamps import FileStamp, stamp_of
from services.core.printable import printable
from services.router.tenants.keys import KeyRing
from services.router.tenants.tenant import OPEN, Quota, Tenant
from services.router.tenants.tenants_file import read_tenants
from services.rpc.authentication import RefusalLog

log = logging.getLogger(__name__)

FLAG = "--tenants"
POLL_S = 1.0
"""How often the file is looked at. It is read when it has been the same twice, so that none is read while it is
written."""

MOST_ROUTERS = 64
"""The most routers that a worker has sessions with."""


@dataclass(slots=True)
class Party:
    """Is what the prompts of one call use of their tenant's quota together: all of them come in, or none does."""

    quota: Quota
    clock: Clock
    num_outside: int
    """Requests that have entered and have no visit yet."""
    num_reserved: int | None = None
    """Tokens that were taken and are no visit's yet; None before any were."""

    def reserve(self, num_tokens: int) -> None:
        """Takes the tokens of all of them, the first time. Raises QuotaExceeded."""
        if self.num_reserved is None:
            self.num_reserved = self.quota.reserve(num_tokens, self.clock.now())

    def hand_over(self, num_tokens: int) -> int:
        """Returns how many of these tokens were taken, which are a visit's from now on."""
        assert self.num_reserved is not None, "they are reserved before"
        taken = min(num_tokens, self.num_reserved)
        self.num_reserved -= taken
        return taken


@dataclass(slots=True)
class Visit:
    """Is one request's use of its tenant's quota."""

    quota: Quota
    clock: Clock
    party: Party | None = None
    num_reserved: int = 0
    num_used: int = 0
    """What of the reserved tokens is to be charged in the end."""

    def reserve(self, num_tokens: int, num_together: int = 0) -> None:
        """Takes the tokens that the request may come to have, once; with a party, of the `num_together` that all may
        have. Raises QuotaExceeded."""
        if self.party is None:
            self.num_reserved = self.quota.reserve(num_tokens, self.clock.now())
        else:
            self.party.reserve(num_together)
            self.num_reserved = self.party.hand_over(num_tokens)


class Gate:
    """Is asked by both fronts who calls, and by the intake whether a request is within its tenant's limits. It is used
    on the event loop."""

    def __init__(
        self, file: str, clock: Clock, *, wall_s: Callable[[], float] = time.time, poll_s: float = POLL_S
    ) -> None:
        """Reads the file; without one (an empty path) everybody is the one open tenant. Raises ConfigError.

        `wall_s` gives Unix seconds, by which keys expire.
        """
        self._file = file
        self._clock = clock
        self._wall_s = wall_s
        self._poll_s = poll_s
        self._refusals = RefusalLog(log)
        self._num_routers = 1
        self._quotas: dict[str, Quota] = {}
        """The quotas of tenants that have had a request, by name."""
        self._asked = asyncio.Event()
        self._stamp: FileStamp | None = None
        self._complaint = ""
        """Why the file could not be taken the last time: it is said once."""
        self._tenants: dict[str, Tenant] = {}
        self._keys = KeyRing(())
        if file:
            self._stamp = stamp_of(file)
            self._take(*_read(file))

    @property
    def is_open(self) -> bool:
        """Returns whether everybody is let in without a key."""
        return not self._file

    def tenant_of(self, authorization: list[str]) -> Tenant:
        """Returns who calls, by the values of the call's `authorization`. Raises InvalidKey."""
        if self.is_open:
            return OPEN
        if len(authorization) > 1:
            raise InvalidKey("several authorizations were given; there may be one")
        return self._keys.tenant_of(authorization[0] if authorization else "", self._wall_s())

    def log_refusal(self, error: InvalidKey, method: str, peer: Callable[[], str]) -> None:
        """Writes a line to the log, once a second at most. `peer` returns whose call it was."""
        self._refusals.log_refusal(peer, printable(method[:64]), str(error))

    @contextlib.contextmanager
    def party(self, tenant: Tenant, num_requests: int) -> Iterator[Party]:
        """Counts the requests of one call as their tenant's, until each has its visit or the block ends. Raises
        QuotaExceeded."""
        quota = self._quota_of(tenant)
        quota.enter(self._clock.now(), num_requests)
        party = Party(quota, self._clock, num_requests)
        try:
            yield party
        finally:
            quota.leave(party.num_reserved or 0, 0, self._clock.now(), num_requests=party.num_outside)

    @contextlib.contextmanager
    def visit(self, tenant: Tenant, party: Party | None = None) -> Iterator[Visit]:
        """Counts a request as its tenant's while the block runs, and settles its tokens. Raises QuotaExceeded, unless
        it has entered with its `party`."""
        quota = self._quota_of(tenant) if party is None else party.quota
        if party is None:
            quota.enter(self._clock.now())
        else:
            party.num_outside -= 1
        visit = Visit(quota, self._clock, party)
        try:
            yield visit
        finally:
            quota.leave(visit.num_reserved, visit.num_used, self._clock.now())

    @contextlib.contextmanager
    def arrival(self, tenant: Tenant) -> Iterator[None]:
        """Counts a request while its body is read, which takes memory before it is let in. Raises QuotaExceeded."""
        quota = self._quota_of(tenant)
        quota.demand(self._clock.now())
        quota.num_arriving += 1
        try:
            yield
        finally:
            quota.num_arriving -= 1

    def quotas(self) -> list[Quota]:
        """Returns those of all tenants that have had a request."""
        return list(self._quotas.values())

    def divide(self, num_routers: int) -> None:
        """Takes this router's part of each tenant's limits from now on: one of `num_routers` equal ones, or of
        `MOST_ROUTERS` if there are more."""
        num_routers = min(max(1, num_routers), MOST_ROUTERS)
        if num_routers == self._num_routers or self.is_open:
            return
        log.info("limits of tenants are divided by %d routers, no longer by %d", num_routers, self._num_routers)
        self._num_routers = num_routers
        for quota in self._quotas.values():
            quota.divide(num_routers, self._clock.now())

    def _quota_of(self, tenant: Tenant) -> Quota:
        quota = self._quotas.get(tenant.name)
        if quota is None:
            newest = self._tenants.get(tenant.name, tenant)  # the file may have changed since its key was looked at
            quota = self._quotas[tenant.name] = Quota(newest, self._clock.now(), self._num_routers)
        return quota

    def reload_soon(self) -> None:
        """Has the file read again, also if it looks unchanged."""
        self._asked.set()

    async def watch(self) -> None:
        """Reads the file again whenever it changes, until it is cancelled. Returns at once without a file."""
        seen = self._stamp
        while not self.is_open:
            is_asked = await self._pause()
            stamp = await asyncio.to_thread(stamp_of, self._file)
            if is_asked or (stamp != self._stamp and stamp == seen):
                # What could not be opened, as for want of descriptors, is tried again.
                self._stamp = stamp if await self._reload() else None
            seen = stamp

    async def _pause(self) -> bool:
        """Waits until it is time to look, or until somebody asks. Returns whether somebody did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._asked.wait()
        is_asked = self._asked.is_set()
        self._asked.clear()
        return is_asked

    async def _reload(self) -> bool:
        """Returns whether the file could be opened and read, whatever it says."""
        try:
            self._take(*await asyncio.to_thread(_read, self._file))
        except ConfigError as error:
            if str(error) != self._complaint:
                log.error("%s; the %d tenants that were read before stay", error, len(self._tenants))
            self._complaint = str(error)
            return not isinstance(error.__cause__, OSError)
        self._complaint = ""
        return True

    def _take(self, tenants: dict[str, Tenant], keys: KeyRing) -> None:
        now = self._clock.now()
        for name, quota in list(self._quotas.items()):
            if name in tenants:
                quota.change(tenants[name].limits, now)
            elif not quota.num_live and not quota.num_arriving:
                del self._quotas[name]
        self._tenants, self._keys = tenants, keys
        log.info("%s: %d tenants with %d keys", printable(self._file), len(tenants), len(keys))


def _open(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)  # opening a FIFO must not block


def _read(file: str) -> tuple[dict[str, Tenant], KeyRing]:
    """Returns the tenants and their keys. Takes some seconds for a large file. Raises ConfigError."""
    origin = f"{FLAG}: {printable(file)}"
    try:
        with open(file, "rb", opener=_open) as opened:
            fd = opened.fileno()
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{origin}: it is not a regular file")
            if mode & stat.S_IWOTH and not os.fstatvfs(fd).f_flag & os.ST_RDONLY:
                raise ConfigError(f"{origin}: everybody may write it, and so let themselves in: chmod o-w it")
            data = opened.read()
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror}") from error
    tenants = read_tenants(data, origin)
    return tenants, KeyRing(tenants.values())
