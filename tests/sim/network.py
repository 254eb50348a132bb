"""Simulates the network between nodes: packets of a stream arrive in order, those of different streams in any; links
can be slow, cut, healed and reset.

Owns: who listens where, every live call, and the state of links. Never: what gRPC makes of it (`rpc_client`,
`rpc_server`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from services.rpc import options
from tests.sim.node import Node
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.rpc_server import SimServer

Receiver = Callable[[Any], None]

FOR_EVER_S = 1e6
CLIENT_NOTICES_S = (options.KEEPALIVE_TIME_MS + options.KEEPALIVE_TIMEOUT_MS) / 1000
SERVER_NOTICES_S = (options.CLIENT_KEEPALIVE_TIME_MS + options.KEEPALIVE_TIMEOUT_MS) / 1000
"""By unanswered pings."""


class Network:
    def __init__(self, world: World, latency_s: float, window: int) -> None:
        """`latency_s`: of a packet that nothing delays; each takes half of it or a few times as much.
        `window`: messages of a stream that its receiver has not read."""
        self.world = world
        self.latency_s = latency_s
        self.window = window
        self.lossy: dict[str, float] = {}
        """Nodes whose replies to unary calls get lost after the call took effect, with this probability."""
        self.servers: dict[str, SimServer] = {}
        self.wires: dict[Wire, None] = {}
        self._cut: set[frozenset[str]] = set()
        self.cut_for_ever: dict[frozenset[str], float] = {}
        """With the time of the cut."""
        self.silent_nodes: set[Node] = set()
        """They never say anything again."""
        self._delays_s: dict[frozenset[str], float] = {}

    def delay_s(self, source: Node, target: Node) -> float:
        random = self.world.random.random()
        usual = self.latency_s * (0.5 + 3 * random * random)
        return usual + source.slowness_s + target.slowness_s + self._delays_s.get(_link(source, target), 0.0)

    def is_cut(self, one: Node, other: Node) -> bool:
        return _link(one, other) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Nothing arrives any more; what is sent waits, as TCP does."""
        self._cut.add(frozenset((one, other)))

    def sever(self, one: str, other: str) -> None:
        """Cuts a link for ever. Each end's keepalive notices in its time."""
        link = frozenset((one, other))
        self.cut(one, other)
        self.cut_for_ever.setdefault(link, self.world.now_s)
        for wire in [wire for wire in self.wires if wire.link == link]:
            wire.starve()

    def heal(self, one: str, other: str, *, reset: bool) -> None:
        """Ends a cut; with `reset` the connections did not survive it."""
        link = frozenset((one, other))
        if link in self.cut_for_ever:
            return
        self._cut.discard(link)
        for wire in [wire for wire in self.wires if wire.link == link]:
            if reset:
                wire.break_off()
            else:
                wire.pump()

    def delay(self, one: str, other: str, delay_s: float) -> None:
        """0 ends it."""
        self._delays_s[frozenset((one, other))] = delay_s

    def wires_between(self, one: str, other: str) -> list[Wire]:
        link = frozenset((one, other))
        return [wire for wire in self.wires if wire.link == link]

    def starve_node(self, node: Node) -> None:
        """It never says anything again. Its peers' pings go unanswered."""
        self.silent_nodes.add(node)
        for wire in [wire for wire in self.wires if node in (wire.client, wire.server)]:
            wire.starve()

    def drop_node(self, node: Node, silent_s: float) -> None:
        """Its process is gone. The kernel says so to the others, or, when the host went with it, nobody does."""
        for wire in [wire for wire in self.wires if node in (wire.client, wire.server)]:
            wire.break_off(silent_s)


class Wire:
    """Joins the two directions of one call, between the client's and the server's node."""

    def __init__(self, network: Network, client: Node, server: Node, method: str) -> None:
        self.network = network
        self.method = method
        self.client = client
        self.server = server
        self.link = _link(client, server)
        self.up = Pipe(self, client, server)
        self.down = Pipe(self, server, client)
        self.client_lost: Callable[[], None] = lambda: None
        """The client's side learns that the connection broke."""
        self.server_lost: Callable[[], None] = lambda: None
        network.wires[self] = None
        if self.link in network.cut_for_ever or network.silent_nodes & {client, server}:
            self.starve()

    def close(self) -> None:
        """Lets both ends know that the call is over."""
        self.network.wires.pop(self, None)
        self.up.close()
        self.down.close()

    def break_off(self, silent_s: float = 0.0) -> None:
        """Breaks the connection: what is under way is lost, and each end notices in its own time, after `silent_s`."""
        if self not in self.network.wires:
            return
        self.close()
        self._notify(self.client, silent_s, lambda: self.client_lost())
        self._notify(self.server, silent_s, lambda: self.server_lost())

    def starve(self) -> None:
        """Nothing arrives any more at either end. Pings go unanswered."""
        if self in self.network.wires:
            self.up.stall(FOR_EVER_S)
            self.down.stall(FOR_EVER_S)
            self._notify(self.client, CLIENT_NOTICES_S, lambda: self.client_lost())
            self._notify(self.server, SERVER_NOTICES_S, lambda: self.server_lost())

    def pump(self) -> None:
        self.up.pump()
        self.down.pump()

    def _notify(self, node: Node, silent_s: float, notice: Callable[[], None]) -> None:
        if node.alive:
            world = self.network.world
            # One end may not notice for long: nothing arrives, and nothing says so.
            half_open_s = world.random.uniform(0.5, 3.0) if world.chance(0.15) else 0.0
            world.after(self.network.latency_s + silent_s + half_open_s, lambda: node.loop.call_soon(notice))


class Pipe:
    """Is one direction of a call: in order, with a bounded number of messages that the receiver has not read."""

    def __init__(self, wire: Wire, source: Node, target: Node) -> None:
        self._wire = wire
        self._source = source
        self._target = target
        self._packets: deque[tuple[float, Any]] = deque()
        self._last_s = 0.0
        self._closed = False
        self._num_unread = 0
        self._waiting: deque[Any] = deque()
        self._stalled_until_s = 0.0
        self.receiver: Receiver = lambda packet: None

    def close(self) -> None:
        self._closed = True
        self._packets.clear()
        while self._waiting:
            future = self._waiting.popleft()
            self._source.loop.call_soon(lambda f=future: f.done() or f.set_result(None))

    def send(self, packet: Any) -> None:
        if self._closed or not self._source.alive:
            return
        network = self._wire.network
        self._last_s = max(self._last_s, network.world.now_s + network.delay_s(self._source, self._target))
        self._packets.append((self._last_s, packet))
        network.world.at(self._last_s, self.pump)

    async def send_message(self, packet: Any) -> None:
        """Waits while the receiver's window is full."""
        while self.is_full and not self._closed:
            future = self._source.loop.create_future()
            self._waiting.append(future)
            await future
        self._num_unread += 1
        self.send(packet)

    @property
    def is_full(self) -> bool:
        return self._num_unread >= self._wire.network.window

    def was_read(self) -> None:
        self._num_unread -= 1
        if self._waiting:
            future = self._waiting.popleft()
            wake = self._source.loop.call_soon
            self._wire.network.world.after(
                self._wire.network.latency_s, lambda: wake(lambda: future.done() or future.set_result(None))
            )

    def stall(self, duration_s: float) -> None:
        """Lets nothing arrive for a while, though the connection lives."""
        world = self._wire.network.world
        self._stalled_until_s = world.now_s + duration_s
        world.at(self._stalled_until_s, self.pump)

    def pump(self) -> None:
        """Delivers what is due."""
        network = self._wire.network
        now_s = network.world.now_s
        if self._closed or now_s < self._stalled_until_s or network.is_cut(self._source, self._target):
            return
        while self._packets and self._packets[0][0] <= now_s:
            _, packet = self._packets.popleft()
            self._target.loop.call_soon(self._deliver, packet)

    def _deliver(self, packet: Any) -> None:
        self.receiver(packet)


def _link(one: Node, other: Node) -> frozenset[str]:
    return frozenset((one.name, other.name))
