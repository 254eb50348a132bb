"""Draws from the seed what goes wrong (of the kinds in `strikes`), and when.

The bias. Faults at random times hit a handoff's short windows once in a thousand runs. So:
- Two out of three are *armed*: they strike at the n-th time that some worker reaches some moment of a handoff (a lease
  is opened, published, sealed, fetched, released; an import is reserved, copied into, validated, ready), at once or
  within a few milliseconds, and mostly the node at which it happens. Half of the links they touch lead to a router:
  what a router does not hear, and what it says late, does the harm.
- A quarter of the seeds repeats one kind of fault, since many bugs need the same thing twice.
- `exile` is made of three faults at once, because no three would ever meet by chance: a slow prefill, and whoever
  imports from it cut off from its routers, so that two decode legs fetch one lease.
- A third of the crashes takes the host along: nobody is told, and only timeouts help.
- `scenario` does the rest: requests in bursts, pools that hold one or two of them, steps and copies slow enough to
  overlap, lease clocks near the length of the faults, and sequences that outgrow their pool together.
- A quarter of the seeds has one fault that never ends: a node that stays dead or frozen, a link that stays cut, a
  stream that stays stalled. `recovery_s` says when the rest of the cluster must have got over it.
Every other fault ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.cluster import Cluster
from tests.sim.scenario import BUSY_S
from tests.sim.strikes import Kind, Strikes, num_blows
from tests.sim.world import World

MOMENTS = (
    "open",
    "publish",
    "seal",
    "open_fetch",
    "release",
    "adopt",
    "reserve",
    "begin",
    "copy_started",
    "copy_ended",
    "validate",
    "ready",
)
# Those that make sense only there.
_WHEN = {"exile": ("open",)}
LONGEST_S = 7.0
"""No fault strikes so long after the last request came."""


class Faults:
    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._strikes = strikes = Strikes(world, cluster)
        self._armed: list[tuple[str, Callable[[str], None]]] = []
        self._over = False
        self.only_pauses = False
        """All that happens is that everything stops for a while, for less than twice the time that silence may last."""
        self.num_faults = 0
        self.num_blows = 0
        """Of these, counted so often as they may look like the crash of a worker to one request."""
        self.quiet_s = 0.0
        """When the last fault that has begun is over."""
        self._kinds: list[Kind] = [
            strikes.crash,
            strikes.crash,
            strikes.hang,
            strikes.hang,
            strikes.partition,
            strikes.partition,
            strikes.exile,
            strikes.exile,
            strikes.exile,
            strikes.reset,
            strikes.reset,
            strikes.stall,
            strikes.stall,
            strikes.delay,
            strikes.slow,
            strikes.lose_replies,
            strikes.fail_steps,
            strikes.stick,
            strikes.terminate,
            strikes.drain,
            strikes.crash_router,
            strikes.hang_router,
            strikes.cancel,
            strikes.pause_host,
            strikes.flip_bits,
            strikes.stop_router,
            strikes.stutter,
            strikes.lose_commands,
        ]
        self._lasting: list[Kind] = [
            strikes.lose,
            strikes.lose,
            strikes.stop_for_ever,
            strikes.stop_for_ever,
            strikes.sever,
            strikes.sever,
            strikes.stall_for_ever,
        ]
        cluster.on_moment = self._moment

    def plan(self) -> None:
        choose = self._world.random
        if self._world.seed % 16 == 9:
            self.only_pauses = True
            self._world.at(choose.uniform(0.5, BUSY_S), self._pause_all)
            return
        num_faults = choose.choice((0, 1, 2, 2, 3, 4, 5, 7))
        only = choose.choice(self._kinds) if choose.random() < 0.25 else None
        kinds = [only or choose.choice(self._kinds) for _ in range(num_faults)]
        if choose.random() < 0.25:
            kinds.append(choose.choice(self._lasting))
        for kind in kinds:
            if kind.__name__ in _WHEN or choose.random() < 0.67:
                self._arm(kind)
            else:
                self._world.at(choose.random() * BUSY_S, lambda kind=kind: self._strike(kind, self._any_worker()))

    def crash(self, name: str) -> None:
        """Kills a worker."""
        self.only_pauses = False
        self._strike(self._strikes.crash, name)

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self._over = True
        self._armed.clear()
        self._strikes.call_off()

    def _arm(self, kind: Kind) -> None:
        choose = self._world.random
        moment, skipped = choose.choice(_WHEN.get(kind.__name__, MOMENTS)), int(choose.random() ** 2 * 6)
        soon_s = 0.0 if kind.__name__ in _WHEN else choose.choice((0.0, 0.0, 0.002, 0.02))

        def reached(name: str) -> None:
            nonlocal skipped
            skipped -= 1
            if skipped < 0:
                self._armed.remove(entry)
                target = name if kind.__name__ in _WHEN or choose.random() < 0.8 else self._any_worker()
                # Never in the middle of what reached the moment.
                self._world.after(choose.random() * soon_s, lambda: self._strike(kind, target))

        entry = (moment, reached)
        self._armed.append(entry)

    def _moment(self, moment: str, name: str) -> None:
        for armed, reached in list(self._armed):
            if armed == moment:
                reached(name)

    def _strike(self, kind: Kind, name: str) -> None:
        if self._over:
            return
        self.num_faults += 1
        self.num_blows += num_blows(kind)
        lasts_s = self._strikes.strike(kind, name)
        self.quiet_s = max(self.quiet_s, self._world.now_s + lasts_s)

    def _pause_all(self) -> None:
        lasts_s = self._strikes.pause_all()
        self.quiet_s = self._world.now_s + lasts_s

    def _any_worker(self) -> str:
        return self._world.random.choice(list(self._cluster.workers))
