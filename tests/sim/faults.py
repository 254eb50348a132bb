"""What goes wrong, and when. All of it comes from the seed.

The bias. Faults at random times hit a handoff's short windows once in a thousand runs. So:
- Two out of three are *armed*: they strike at the n-th time that some worker reaches some moment of a handoff (a lease
  is opened, published, sealed, fetched, released; an import is reserved, copied into, validated, ready), at once or
  within a few milliseconds, and mostly the node at which it happens. Half of the links they touch lead to a router:
  what a router does not hear, and what it says late, does the harm.
- A quarter of the seeds repeats one kind of fault, since many bugs need the same thing twice.
- `_exile` is made of three faults at once, because no three would ever meet by chance: a slow prefill, and whoever
  imports from it cut off from its routers, so that two decode legs fetch one lease.
- A third of the crashes takes the host along: nobody is told, and only timeouts help.
- `scenario` does the rest: requests in bursts, pools that hold one or two of them, steps and copies slow enough to
  overlap, lease clocks near the length of the faults, and sequences that outgrow their pool together.
Every fault ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.cluster import Cluster
from tests.sim.scenario import BUSY_S
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
_WHEN = {"_exile": ("open",)}
# How often each may fail a request; a worker that leaves in order, and a slow or stopped router, fail none.
_BLOWS = {
    "_fail_steps": 2,
    "_lose_replies": 3,
    "_exile": 3,
    "_delay": 0,
    "_slow": 0,
    "_terminate": 0,
    "_drain": 0,
    "_crash_router": 0,
    "_hang_router": 0,
    "_cancel": 0,
}
LONGEST_S = 7.0
"""No fault strikes so long after the last request came."""


class Faults:
    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._armed: list[tuple[str, Callable[[str], None]]] = []
        self.num_faults = 0
        self.num_blows = 0
        """Of these, counted so often as they may look like the crash of a worker to one request."""
        self.quiet_s = 0.0
        """When the last fault that has begun is over."""
        self._kinds: list[Callable[[str], float]] = [
            self._crash,
            self._crash,
            self._hang,
            self._hang,
            self._partition,
            self._partition,
            self._exile,
            self._exile,
            self._exile,
            self._reset,
            self._reset,
            self._stall,
            self._stall,
            self._delay,
            self._slow,
            self._lose_replies,
            self._fail_steps,
            self._stick,
            self._terminate,
            self._drain,
            self._crash_router,
            self._hang_router,
            self._cancel,
        ]
        cluster.on_moment = self._moment

    def plan(self) -> None:
        choose = self._world.random
        num_faults = choose.choice((0, 1, 2, 2, 3, 4, 5, 7))
        only = choose.choice(self._kinds) if choose.random() < 0.25 else None
        for _ in range(num_faults):
            strike = only or choose.choice(self._kinds)
            if strike.__name__ in _WHEN or choose.random() < 0.67:
                self._arm(strike)
            else:
                self._world.at(choose.random() * BUSY_S, lambda strike=strike: self._strike(strike, self._any_worker()))

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self._armed.clear()
        for worker in self._cluster.workers.values():
            worker.engine.num_steps_to_fail = 0

    # When.

    def _arm(self, strike: Callable[[str], float]) -> None:
        choose = self._world.random
        moment, skipped = choose.choice(_WHEN.get(strike.__name__, MOMENTS)), int(choose.random() ** 2 * 6)
        soon_s = 0.0 if strike.__name__ in _WHEN else choose.choice((0.0, 0.0, 0.002, 0.02))

        def reached(name: str) -> None:
            nonlocal skipped
            skipped -= 1
            if skipped < 0:
                self._armed.remove(entry)
                target = name if strike.__name__ in _WHEN or choose.random() < 0.8 else self._any_worker()
                # Never in the middle of what reached the moment.
                self._world.after(choose.random() * soon_s, lambda: self._strike(strike, target))

        entry = (moment, reached)
        self._armed.append(entry)

    def _moment(self, moment: str, name: str) -> None:
        for armed, reached in list(self._armed):
            if armed == moment:
                reached(name)

    def _strike(self, strike: Callable[[str], float], name: str) -> None:
        self.num_faults += 1
        self.num_blows += _BLOWS.get(strike.__name__, 1)
        lasts_s = strike(name)
        self.quiet_s = max(self.quiet_s, self._world.now_s + lasts_s)

    # What. Each takes the name of a worker, and answers how long it lasts.

    def _crash(self, name: str) -> float:
        back_s = self._world.random.choice((0.05, 0.5, 2.0))
        # Every third time the host is gone, and only keepalive tells.
        self._cluster.crash(name, silent_s=self._world.random.choice((0.0, 0.0, 8.0)))
        self._world.after(back_s, lambda: self._cluster.restart(name) if not self._alive(name) else None)
        return back_s + 8.0

    def _hang(self, name: str) -> float:
        lasts_s = self._duration()
        self._cluster.freeze(name)
        self._world.after(lasts_s, lambda: self._cluster.thaw(name))
        return lasts_s

    def _partition(self, name: str) -> float:
        lasts_s = self._duration()
        self._part(name, self._peer(name), lasts_s, reset=self._world.chance(0.5))
        return lasts_s

    def _part(self, name: str, other: str, lasts_s: float, *, reset: bool) -> None:
        self._world.note("cut", name, other)
        self._cluster.network.cut(name, other)

        def heal() -> None:
            self._world.note("heal", name, other)
            self._cluster.network.heal(name, other, reset=reset)

        self._world.after(lasts_s, heal)

    def _exile(self, name: str) -> float:
        """Whoever imports from this worker is given up by its routers and does not know it, while the source takes its
        time: so two legs come to fetch one lease."""
        world, lasts_s = self._world, self._world.random.uniform(2.5, 4.5)
        self._cluster.workers[name].engine.stuck_until_s = world.now_s + lasts_s

        def banish() -> None:
            for worker in list(self._cluster.workers.values()):
                if len(worker.host.imports) and worker.plan.name != name:
                    for router in self._cluster.routers:
                        self._part(worker.plan.name, router, lasts_s, reset=False)

        world.after(0.1, banish)
        return lasts_s + 0.2

    def _reset(self, name: str) -> float:
        wires = [
            wire
            for other in self._names()
            if other != name
            for wire in self._cluster.network.wires_between(name, other)
        ]
        if wires:
            self._world.note("reset", name)
            self._world.random.choice(wires).break_off()
        return 4.0

    def _stall(self, name: str) -> float:
        wires = self._cluster.network.wires_between(name, self._peer(name))
        lasts_s = self._duration()
        if wires:
            wire = self._world.random.choice(wires)
            self._world.note("stall", name, lasts_s)
            (wire.up if self._world.chance(0.5) else wire.down).stall(lasts_s)
        return lasts_s

    def _delay(self, name: str) -> float:
        other, lasts_s = self._peer(name), self._duration()
        self._cluster.network.delay(name, other, self._world.random.choice((0.03, 0.3)))
        self._world.after(lasts_s, lambda: self._cluster.network.delay(name, other, 0.0))
        return lasts_s

    def _slow(self, name: str) -> float:
        node, lasts_s = self._cluster.workers[name].node, self._duration()
        node.slowness_s = self._world.random.choice((0.02, 0.2))

        def recover() -> None:
            node.slowness_s = 0.0

        self._world.after(lasts_s, recover)
        return lasts_s

    def _lose_replies(self, name: str) -> float:
        lossy, lasts_s = self._cluster.network.lossy, self._duration()
        lossy[name] = self._world.random.choice((0.5, 1.0))
        self._world.after(lasts_s, lambda: lossy.pop(name, None))
        return lasts_s

    def _fail_steps(self, name: str) -> float:
        self._world.note("steps fail", name)
        self._cluster.workers[name].engine.num_steps_to_fail += self._world.random.randint(1, 2)
        return 0.0

    def _stick(self, name: str) -> float:
        lasts_s = self._duration()
        self._world.note("stuck", name, lasts_s)
        self._cluster.workers[name].engine.stuck_until_s = self._world.now_s + lasts_s
        return lasts_s

    def _terminate(self, name: str) -> float:
        self._cluster.terminate(name, deadline_s=self._world.random.choice((0.0, 0.3, 2.0)))
        return 5.0

    def _drain(self, name: str) -> float:
        """By an operator: it leaves, and comes back."""
        router = self._world.random.choice(list(self._cluster.routers))
        self._cluster.drain(router, name, self._world.random.choice((0.0, 0.3, 2.0)))
        return 5.0

    def _crash_router(self, _: str) -> float:
        return self._crash(self._world.random.choice(list(self._cluster.routers)))

    def _hang_router(self, _: str) -> float:
        return self._hang(self._world.random.choice(list(self._cluster.routers)))

    def _cancel(self, _: str) -> float:
        live = [request for request in self._cluster.requests if not request.over]
        if live:
            self._cluster.cancel(self._world.random.choice(live))
        return 0.0

    # Where.

    def _any_worker(self) -> str:
        return self._world.random.choice(list(self._cluster.workers))

    def _names(self) -> list[str]:
        return [*self._cluster.workers, *self._cluster.routers]

    def _peer(self, name: str) -> str:
        """Mostly a router: behind its back things go on, and what it is told late does harm."""
        if self._world.chance(0.5):
            return self._world.random.choice(list(self._cluster.routers))
        return self._world.random.choice([other for other in self._names() if other != name])

    def _alive(self, name: str) -> bool:
        return (self._cluster.workers.get(name) or self._cluster.routers[name]).node.alive

    def _duration(self) -> float:
        return self._world.random.choice((0.1, 0.7, 1.5, 3.0, 6.0))
