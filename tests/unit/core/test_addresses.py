"""Tests what is taken for HOST:PORT, and what is refused."""

from __future__ import annotations

import pytest

from services.core.addresses import is_address, is_dialable, network_of, parse


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:1", ("localhost", 1)),
        ("router:65535", ("router", 65535)),
        ("prefill_0.pool-1.svc.cluster.local.:50051", ("prefill_0.pool-1.svc.cluster.local.", 50051)),
        ("192.0.2.7:50051", ("192.0.2.7", 50051)),
        ("[2001:db8::7]:50051", ("2001:db8::7", 50051)),
        ("9lives:80", ("9lives", 80)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert parse(address) == parts
    assert is_address(address)
    assert is_dialable(address)


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "host",
            "host:",
            ":1",
            "host:0",
            "host:65536",
            "host:-1",
            "host:1e3",
            "host:000001",
            "host:１",
            "host:1 ",
        ),
        *("a b:1", "a..b:1", "-a:1", "a-:1", "x" * 64 + ":1", ".".join(["x" * 60] * 5) + ":1", "ünï:1", "a/b:1"),
        *(
            "::1:80",
            "[::1]80",
            "[::g]:1",
            "[]:1",
            "1.2.3:1",
            "256.1.1.1:1",
            "1.2.3.4.5:1",
            "01.2.3.4:1",
            "a\0b:1",
            "\n:1",
        ),
    ],
    ids=ascii,
)
def test_what_is_none(address: str) -> None:
    assert not is_address(address)
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1"])
def test_a_wildcard_is_bound_and_not_dialled(address: str) -> None:
    assert is_address(address)
    assert not is_dialable(address)


def test_addresses_of_the_same_network_are_one_peer() -> None:
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2::") != network_of("2001:db8:1:3::4")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert network_of("") == ""
