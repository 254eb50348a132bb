"""Tests which transport is taken, by what probes and fetches have shown."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from services.kvtransfer.transport_choice import TransportChoice
from services.kvtransfer.transports import fastest_s

MIB = 1 << 20


@dataclass(frozen=True)
class End:
    transport: str


SHM, TCP, GRPC = End("shm"), End("tcp"), End("grpc")


def test_the_fastest_comes_first_and_what_was_not_compared_last() -> None:
    choice = TransportChoice()
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [SHM, TCP, GRPC]
    choice.probed(1, {"shm": 1e9, "tcp": 2e9})
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [TCP, SHM, GRPC]
    assert choice.in_order(2, [SHM, TCP, GRPC]) == [SHM, TCP, GRPC]
    choice.failed(1)
    assert not choice.knows(1)


def test_what_does_not_work_comes_after_what_does() -> None:
    choice = TransportChoice()
    choice.probed(1, {"shm": 0.0, "tcp": 1.0})
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [TCP, GRPC, SHM]


def test_what_was_not_reached_comes_last_until_a_probe_has_reached_it() -> None:
    choice = TransportChoice()
    choice.probed(1, {"shm": 2.0, "tcp": 1.0})
    choice.unusable(1, "shm")
    assert not choice.knows(1)
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [TCP, GRPC, SHM]
    choice.failed(1)
    choice.unusable(1, "tcp")
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [GRPC, SHM, TCP]
    choice.probed(1, {"shm": 2.0, "tcp": 0.0})
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [SHM, GRPC, TCP]


def test_fetches_correct_a_probe() -> None:
    choice = TransportChoice()
    choice.probed(1, {"shm": 4e9, "tcp": 2e9})
    for _ in range(20):
        choice.fetched(1, "shm", 100 * MIB, 0.1)
    assert choice.in_order(1, [SHM, TCP]) == [TCP, SHM]
    assert abs((choice.rate(1, "shm") or 0) / (1000 * MIB) - 1) < 0.02


def test_what_is_not_probed_is_known_by_its_fetches() -> None:
    choice = TransportChoice()
    choice.probed(1, {"shm": 0.0, "tcp": 3e8})
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [TCP, GRPC, SHM]
    choice.fetched(1, "grpc", 100 * MIB, 0.1)
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [GRPC, TCP, SHM]
    choice.probed(1, {"shm": 0.0, "tcp": 3e9})
    assert choice.in_order(1, [SHM, TCP, GRPC]) == [TCP, GRPC, SHM]


def test_small_fetches_and_those_of_unknown_sources_say_nothing() -> None:
    choice = TransportChoice()
    choice.probed(1, {"shm": 4e9})
    choice.fetched(1, "shm", MIB - 1, 1.0)
    choice.fetched(2, "shm", 100 * MIB, 0.01)
    choice.fetched(1, "shm", 100 * MIB, 0.0)
    assert (choice.rate(1, "shm"), choice.rate(2, "shm")) == (4e9, None)


def test_the_number_of_sources_is_bounded() -> None:
    choice = TransportChoice()
    for source in range(1000):
        choice.probed(source, {"shm": 1.0})
        choice.unusable(source + 1000, "shm")
    assert sum(map(choice.knows, range(1000))) == 256
    assert choice.knows(999)
    assert sum(map(choice.has_unusable, range(2000))) <= 256


class Stopwatch:
    """Lets each of several turns take a given number of seconds."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)
        self._now = 0.0
        self.turns = count()

    def turn(self) -> None:
        self._now += self._left[next(self.turns)]

    def now(self) -> float:
        return self._now


def test_a_probe_that_was_held_up_does_not_count() -> None:
    watch = Stopwatch(0.009, 0.005, 0.001, 0.030, 0.002)
    assert round(fastest_s(watch.turn, watch.now), 6) == 0.001
    assert next(watch.turns) == 5


def test_over_a_slow_network_a_probe_is_made_twice() -> None:
    watch = Stopwatch(1.5, 1.0, 0.1)
    assert fastest_s(watch.turn, watch.now) == 1.0
    assert next(watch.turns) == 2
