"""Tests what a worker says of where its blocks are: kept, sent on and logged, so it has bounds
like what it registered."""

from __future__ import annotations

import pytest

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import ProtocolViolation
from services.router.coordinator.events import LegFailed, PrefillStarted
from services.router.workers import wire

LEASE = bytes(range(16))
HONEST = types_pb2.KVSource(
    address="127.0.0.1:5000",
    incarnation=7,
    offers=[
        types_pb2.KVOffer(transport=types_pb2.TRANSPORT_SHM, shm_socket="@baton-0123456789abcdef"),
        types_pb2.KVOffer(transport=types_pb2.TRANSPORT_GRPC),
    ],
    layout=types_pb2.KVLayout(model_id="m"),
)


def offering(**last: str) -> types_pb2.KVSource:
    return types_pb2.KVSource(offers=[*HONEST.offers, types_pb2.KVOffer(**last)])


LIES = {
    "offers without end": types_pb2.KVSource(offers=[types_pb2.KVOffer(transport=types_pb2.TRANSPORT_SHM)] * 17),
    "a long address": types_pb2.KVSource(address="a" * 263),
    "an address a terminal obeys": types_pb2.KVSource(address="\x1b[2J:1"),
    "a socket beyond what the kernel takes": offering(shm_socket="@" + "s" * 108),
    "a socket of two lines": offering(shm_socket="@a\nb"),
    "a long layout": types_pb2.KVSource(layout=types_pb2.KVLayout(weights_digest="f" * 257)),
}


def heard(source: types_pb2.KVSource, lease_id: bytes = LEASE) -> object:
    started = worker_pb2.PrefillStarted(leg=3, lease_id=lease_id, source=source, cached_tokens=-1)
    return wire.leg_event(worker_pb2.LegEvent(started=started))


def test_an_honest_source_is_taken_as_it_is() -> None:
    assert heard(HONEST) == PrefillStarted(3, LEASE, HONEST, 0)


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_is_none_fails_the_leg(lie: str) -> None:
    event = heard(LIES[lie])
    assert isinstance(event, LegFailed)
    assert event.leg == 3
    assert isinstance(event.error, ProtocolViolation)


def test_a_lease_has_the_name_of_one() -> None:
    assert isinstance(heard(HONEST, LEASE * 2), LegFailed)


def test_what_the_message_holds_beyond_its_fields_is_dropped() -> None:
    unknown = types_pb2.KVSource.FromString(HONEST.SerializeToString() + b"\xa2\x06\x04more")
    event = heard(unknown)
    assert isinstance(event, PrefillStarted)
    assert isinstance(event.source, types_pb2.KVSource)
    assert event.source.SerializeToString() == HONEST.SerializeToString()
