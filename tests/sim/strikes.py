"""Defines what can go wrong: each kind of fault, whom it disturbs, and how long it lasts.

Owns: every act against the cluster. Never: how many there are, and when (`faults`).
"""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.cluster import Cluster
from tests.sim.engine import SimEngine
from tests.sim.network import FOR_EVER_S
from tests.sim.recovery import recovery_s
from tests.sim.world import World

Kind = Callable[[str], float]
"""A method of `Strikes`: takes the name of a worker, and answers how long it lasts."""

# How often each may fail a request; a worker that leaves in order, and a slow or stopped router, fail none.
_BLOWS = {
    "fail_steps": 2,
    "lose_replies": 3,
    "exile": 3,
    "delay": 0,
    "slow": 0,
    "terminate": 0,
    "drain": 0,
    "crash_router": 0,
    "hang_router": 0,
    "cancel": 0,
    "pause_host": 0,
    "stutter": 0,
    "lose_commands": 2,
    "flip_bits": 2,
    "stop_router": 0,
    "sever": 3,  # what is tried over it again and again fails
    "stall_for_ever": 3,
    "lose": 2,
    "stop_for_ever": 2,
}
# What says itself whom it disturbs; and what may go on at any later time.
_ELSEWHERE = {"partition", "crash_router", "hang_router", "pause_host", "stop_router", "cancel", "sever"}
_ELSEWHERE |= {"stutter", "lose", "stop_for_ever", "exile", "delay"}
_AGAIN = {"lose_commands", "fail_steps", "flip_bits", "stall_for_ever"}


def num_blows(kind: Kind) -> int:
    """Returns how often the fault may look like the crash of a worker to one request."""
    return _BLOWS.get(kind.__name__, 1)


class Strikes:
    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster

    def strike(self, kind: Kind, name: str) -> float:
        """Does it, and has it written down whom it disturbs."""
        lasts_s = kind(name)
        if kind.__name__ not in _ELSEWHERE:
            self._disturb(FOR_EVER_S if kind.__name__ in _AGAIN else lasts_s, name)
        return lasts_s

    def call_off(self) -> None:
        """Calls off what was to go wrong at a next occasion."""
        for worker in self._cluster.workers.values():
            if isinstance(worker.engine, SimEngine):
                worker.engine.num_steps_to_fail = 0
            worker.memory.num_bits_to_flip = 0
            worker.node.num_commands_to_lose = 0

    def _disturb(self, lasts_s: float, *names: str) -> None:
        now_s = self._world.now_s
        self._cluster.record.disturb(now_s, now_s + lasts_s, *names)

    # Those that end by themselves.

    def crash(self, name: str) -> float:
        back_s = self._world.random.choice((0.05, 0.5, 2.0))
        # Every third time the host is gone, and only keepalive tells.
        self._cluster.crash(name, silent_s=self._world.random.choice((0.0, 0.0, 8.0)))
        self._world.after(back_s, lambda: self._cluster.restart(name) if not self._alive(name) else None)
        return back_s + 8.0

    def hang(self, name: str) -> float:
        lasts_s = self._duration()
        self._cluster.freeze(name)
        self._world.after(lasts_s, lambda: self._cluster.thaw(name))
        return lasts_s

    def partition(self, name: str) -> float:
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

    def exile(self, name: str) -> float:
        """Whoever imports from this worker is given up by its routers and does not know it, while the source takes its
        time: so two legs come to fetch one lease."""
        world, lasts_s = self._world, self._world.random.uniform(2.5, 4.5)
        self._disturb(lasts_s, name)
        self._stick_until(name, world.now_s + lasts_s)

        def banish() -> None:
            for worker in list(self._cluster.workers.values()):
                if len(worker.host.imports) and worker.plan.name != name:
                    for router in self._cluster.routers:
                        self._part(worker.plan.name, router, lasts_s, reset=False)

        world.after(0.1, banish)
        return lasts_s + 0.2

    def reset(self, name: str) -> float:
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

    def stall(self, name: str) -> float:
        wires = self._cluster.network.wires_between(name, self._peer(name))
        lasts_s = self._duration()
        if wires:
            wire = self._world.random.choice(wires)
            self._world.note("stall", name, lasts_s)
            (wire.up if self._world.chance(0.5) else wire.down).stall(lasts_s)
        return lasts_s

    def delay(self, name: str) -> float:
        other, lasts_s = self._peer(name), self._duration()
        self._disturb(lasts_s, name, other)
        self._cluster.network.delay(name, other, self._world.random.choice((0.03, 0.3)))
        self._world.after(lasts_s, lambda: self._cluster.network.delay(name, other, 0.0))
        return lasts_s

    def slow(self, name: str) -> float:
        node, lasts_s = self._cluster.workers[name].node, self._duration()
        node.slowness_s = self._world.random.choice((0.02, 0.2))

        def recover() -> None:
            node.slowness_s = 0.0

        self._world.after(lasts_s, recover)
        return lasts_s

    def lose_replies(self, name: str) -> float:
        lossy, lasts_s = self._cluster.network.lossy, self._duration()
        lossy[name] = self._world.random.choice((0.5, 1.0))
        self._world.after(lasts_s, lambda: lossy.pop(name, None))
        return lasts_s

    def fail_steps(self, name: str) -> float:
        self._world.note("steps fail", name)
        num_steps, engine = self._world.random.randint(1, 2), self._cluster.workers[name].engine
        if isinstance(engine, SimEngine):
            engine.num_steps_to_fail += num_steps
        return 0.0

    def _stick_until(self, name: str, until_s: float) -> None:
        """Makes the device silent, where there is one."""
        engine = self._cluster.workers[name].engine
        if isinstance(engine, SimEngine):
            engine.stuck_until_s = until_s

    def stick(self, name: str) -> float:
        lasts_s = self._duration()
        self._world.note("stuck", name, lasts_s)
        self._stick_until(name, self._world.now_s + lasts_s)
        return lasts_s

    def terminate(self, name: str) -> float:
        self._cluster.terminate(name, deadline_s=self._world.random.choice((0.0, 0.3, 2.0)))
        return 5.0

    def drain(self, name: str) -> float:
        """Drains a worker, as an operator does: it leaves, and comes back."""
        router = self._world.random.choice(list(self._cluster.routers))
        self._cluster.drain(router, name, self._world.random.choice((0.0, 0.3, 2.0)))
        return 5.0

    def crash_router(self, _: str) -> float:
        return self._at_router(self.crash)

    def hang_router(self, _: str) -> float:
        return self._at_router(self.hang)

    def _at_router(self, kind: Kind) -> float:
        router = self._world.random.choice(list(self._cluster.routers))
        lasts_s = kind(router)
        self._disturb(lasts_s, router)
        return lasts_s

    def stop_router(self, _: str) -> float:
        """SIGTERM; its supervisor starts another."""
        router, deadline_s = (
            self._world.random.choice(list(self._cluster.routers)),
            self._world.random.choice((0.0, 1.0)),
        )
        self._cluster.stop_router(router, deadline_s)
        self._disturb(deadline_s + 4.0, router)
        return deadline_s + 4.0

    def pause_host(self, name: str) -> float:
        """Stops several nodes together, and lets them go on together: all there are, or those of one host."""
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

    def pause_all(self) -> float:
        """Stops all nodes together, and lets them go on together."""
        lasts_s = self._world.random.choice((0.7, 1.5, 3.0, 3.8))
        for name in self._names():
            self._cluster.freeze(name)
            self._disturb(lasts_s, name)
            self._world.after(lasts_s, lambda name=name: self._cluster.thaw(name))  # type: ignore[misc]
        return lasts_s

    def stutter(self, name: str) -> float:
        """Makes callbacks of an event loop take long now and then: another thread holds the interpreter's lock."""
        loop, lasts_s = self._cluster.node(self._perhaps_a_router(name)).loop, self._duration()
        self._disturb(lasts_s, loop.actor.machine.name)
        loop.stutter = 0.03

        def recover() -> None:
            loop.stutter = 0.0

        self._world.after(lasts_s, recover)
        return lasts_s

    def lose_commands(self, name: str) -> float:
        """Gives the worker a defect: what a router wants of it is read and forgotten."""
        self._world.note("forgets", name)
        self._cluster.workers[name].node.num_commands_to_lose += self._world.random.randint(1, 2)
        return 0.0

    def flip_bits(self, name: str) -> float:
        """Flips bits in blocks that are copied to a worker that checks what it copies."""
        worker = self._cluster.workers[name]
        if worker.plan.config.checksums == "always":
            worker.memory.num_bits_to_flip += self._world.random.randint(1, 3)
        return 0.0

    def cancel(self, _: str) -> float:
        live = [request for request in self._cluster.requests if not request.over]
        if live:
            self._cluster.cancel(self._world.random.choice(live))
        return 0.0

    # For ever.

    def lose(self, name: str) -> float:
        name = self._perhaps_a_router(name)
        self._cluster.lose(name, silent=self._world.chance(0.5))
        self._disturb(FOR_EVER_S, name)
        return recovery_s(self._cluster)

    def stop_for_ever(self, name: str) -> float:
        name = self._perhaps_a_router(name)
        self._cluster.stop_for_ever(name)
        self._disturb(FOR_EVER_S, name)
        return recovery_s(self._cluster)

    def sever(self, name: str) -> float:
        other = self._peer(name)
        self._world.note("severed", name, other)
        self._cluster.network.sever(name, other)
        self._disturb(FOR_EVER_S, name, other)
        return recovery_s(self._cluster)

    def stall_for_ever(self, name: str) -> float:
        """Stalls one direction of a session or a fetch, while all else goes on."""
        wires = self._cluster.network.wires_between(name, self._peer(name))
        wires = [wire for wire in wires if wire.method.endswith(("/Session", "/Fetch"))]
        if wires:
            wire = self._world.random.choice(wires)
            self._world.note("stalled", name)
            (wire.up if self._world.chance(0.5) else wire.down).stall(FOR_EVER_S)
        return recovery_s(self._cluster)

    # Where, and how long.

    def _perhaps_a_router(self, name: str) -> str:
        return self._world.random.choice(list(self._cluster.routers)) if self._world.chance(0.3) else name

    def _names(self) -> list[str]:
        return [*self._cluster.workers, *self._cluster.routers]

    def _peer(self, name: str) -> str:
        """Returns a peer of the node, mostly a router: behind its back things go on, and what it is told late does
        harm."""
        if self._world.chance(0.5):
            return self._world.random.choice(list(self._cluster.routers))
        return self._world.random.choice([other for other in self._names() if other != name])

    def _alive(self, name: str) -> bool:
        return (self._cluster.workers.get(name) or self._cluster.routers[name]).node.alive

    def _duration(self) -> float:
        return self._world.random.choice((0.1, 0.7, 1.5, 3.0, 6.0))
