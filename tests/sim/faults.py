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
- A quarter of the seeds has one fault that never ends: a node that stays dead or frozen, a link that stays cut, a
  stream that stays stalled. `recovery_s` says when the rest of the cluster must have got over it.
Every other fault ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.cluster import Cluster
from tests.sim.network import FOR_EVER_S
from tests.sim.recovery import recovery_s
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
    "_pause_host": 0,
    "_stutter": 0,
    "_lose_commands": 2,
    "_flip_bits": 2,
    "_stop_router": 0,
    "_sever": 3,  # what is tried over it again and again fails
    "_stall_for_ever": 3,
    "_lose": 2,
    "_stop_for_ever": 2,
}
# What says itself whom it disturbs; and what may go on at any later time.
_ELSEWHERE = {"_partition", "_crash_router", "_hang_router", "_pause_host", "_stop_router", "_cancel", "_sever"}
_ELSEWHERE |= {"_stutter", "_lose", "_stop_for_ever", "_exile", "_delay"}
_AGAIN = {"_lose_commands", "_fail_steps", "_flip_bits", "_stall_for_ever"}
LONGEST_S = 7.0
"""No fault strikes so long after the last request came."""


class Faults:
    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._armed: list[tuple[str, Callable[[str], None]]] = []
        self._over = False
        self.only_pauses = False
        """All that happens is that everything stops for a while, for less than twice the time that silence may last."""
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
            self._pause_host,
            self._flip_bits,
            self._stop_router,
            self._stutter,
            self._lose_commands,
        ]
        self._lasting: list[Callable[[str], float]] = [
            self._lose,
            self._lose,
            self._stop_for_ever,
            self._stop_for_ever,
            self._sever,
            self._sever,
            self._stall_for_ever,
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
        strikes = [only or choose.choice(self._kinds) for _ in range(num_faults)]
        if choose.random() < 0.25:
            strikes.append(choose.choice(self._lasting))
        for strike in strikes:
            if strike.__name__ in _WHEN or choose.random() < 0.67:
                self._arm(strike)
            else:
                self._world.at(choose.random() * BUSY_S, lambda strike=strike: self._strike(strike, self._any_worker()))

    def disarm(self) -> None:
        """Nothing more goes wrong."""
        self._over = True
        self._armed.clear()
        for worker in self._cluster.workers.values():
            worker.engine.num_steps_to_fail = 0
            worker.memory.num_bits_to_flip = 0
            worker.node.num_commands_to_lose = 0

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
        if self._over:
            return
        self.num_faults += 1
        self.num_blows += _BLOWS.get(strike.__name__, 1)
        lasts_s = strike(name)
        now_s = self._world.now_s
        self.quiet_s = max(self.quiet_s, now_s + lasts_s)
        if strike.__name__ not in _ELSEWHERE:
            self._disturb(FOR_EVER_S if strike.__name__ in _AGAIN else lasts_s, name)

    def _disturb(self, lasts_s: float, *names: str) -> None:
        now_s = self._world.now_s
        self._cluster.record.disturb(now_s, now_s + lasts_s, *names)

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
        self._disturb(lasts_s, name, other)

        def heal() -> None:
            self._world.note("heal", name, other)
            self._cluster.network.heal(name, other, reset=reset)

        self._world.after(lasts_s, heal)

    def _exile(self, name: str) -> float:
        """Whoever imports from this worker is given up by its routers and does not know it, while the source takes its
        time: so two legs come to fetch one lease."""
        world, lasts_s = self._world, self._world.random.uniform(2.5, 4.5)
        self._disturb(lasts_s, name)
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
        self._disturb(lasts_s, name, other)
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
        return self._at_router(self._crash)

    def _hang_router(self, _: str) -> float:
        return self._at_router(self._hang)

    def _at_router(self, strike: Callable[[str], float]) -> float:
        router = self._world.random.choice(list(self._cluster.routers))
        lasts_s = strike(router)
        self._disturb(lasts_s, router)
        return lasts_s

    def _stop_router(self, _: str) -> float:
        """SIGTERM; its supervisor starts another."""
        router, deadline_s = (
            self._world.random.choice(list(self._cluster.routers)),
            self._world.random.choice((0.0, 1.0)),
        )
        self._cluster.stop_router(router, deadline_s)
        self._disturb(deadline_s + 4.0, router)
        return deadline_s + 4.0

    def _pause_host(self, name: str) -> float:
        """Several nodes stop together, and go on together: all there are, or those of one host."""
        choose, lasts_s = self._world.random, self._duration()
        names = self._names()
        paused = (
            names if choose.random() < 0.5 else [other for other in names if other == name or choose.random() < 0.5]
        )
        for each in paused:
            self._cluster.freeze(each)
            self._disturb(lasts_s, each)
            self._world.after(lasts_s, lambda each=each: self._cluster.thaw(each))
        return lasts_s

    def _stutter(self, name: str) -> float:
        """Callbacks of its event loop take long now and then: somebody holds the interpreter's lock."""
        loop, lasts_s = self._cluster.node(self._perhaps_a_router(name)).loop, self._duration()
        self._disturb(lasts_s, loop.actor.machine.name)
        loop.stutter = 0.03

        def recover() -> None:
            loop.stutter = 0.0

        self._world.after(lasts_s, recover)
        return lasts_s

    def _lose_commands(self, name: str) -> float:
        """A defect of the worker: what a router wants of it is read and forgotten."""
        self._world.note("forgets", name)
        self._cluster.workers[name].node.num_commands_to_lose += self._world.random.randint(1, 2)
        return 0.0

    def _pause_all(self) -> None:
        lasts_s = self._world.random.choice((0.7, 1.5, 3.0, 3.8))
        for name in self._names():
            self._cluster.freeze(name)
            self._disturb(lasts_s, name)
            self._world.after(lasts_s, lambda name=name: self._cluster.thaw(name))  # type: ignore[misc]
        self.quiet_s = self._world.now_s + lasts_s

    def _flip_bits(self, name: str) -> float:
        """In blocks that are copied to a worker that checks what it copies."""
        worker = self._cluster.workers[name]
        if worker.plan.config.checksums:
            worker.memory.num_bits_to_flip += self._world.random.randint(1, 3)
        return 0.0

    # For ever.

    def _lose(self, name: str) -> float:
        name = self._perhaps_a_router(name)
        self._cluster.lose(name, silent=self._world.chance(0.5))
        self._disturb(FOR_EVER_S, name)
        return recovery_s(self._cluster)

    def _stop_for_ever(self, name: str) -> float:
        name = self._perhaps_a_router(name)
        self._cluster.stop_for_ever(name)
        self._disturb(FOR_EVER_S, name)
        return recovery_s(self._cluster)

    def _sever(self, name: str) -> float:
        other = self._peer(name)
        self._world.note("severed", name, other)
        self._cluster.network.sever(name, other)
        self._disturb(FOR_EVER_S, name, other)
        return recovery_s(self._cluster)

    def _stall_for_ever(self, name: str) -> float:
        """One direction of a session or a fetch, while all else goes on."""
        wires = self._cluster.network.wires_between(name, self._peer(name))
        wires = [wire for wire in wires if wire.method.endswith(("/Session", "/Fetch"))]
        if wires:
            wire = self._world.random.choice(wires)
            self._world.note("stalled", name)
            (wire.up if self._world.chance(0.5) else wire.down).stall(FOR_EVER_S)
        return recovery_s(self._cluster)

    def _perhaps_a_router(self, name: str) -> str:
        return self._world.random.choice(list(self._cluster.routers)) if self._world.chance(0.3) else name

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
