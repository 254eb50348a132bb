"""Tests the budgets of peers that send wrong keys: who is told to wait, for how long, and that the table is bounded."""

from __future__ import annotations

from services.router.tenants.wrong_keys import BURST, MOST_PEERS, PER_S, WrongKeys


def test_a_peer_that_sends_many_is_to_wait_until_it_may_send_one() -> None:
    keys = WrongKeys()
    assert [keys.count("a", 10.0) for _ in range(BURST)] == [0.0] * BURST
    wait_s = keys.count("a", 10.0)
    assert abs(wait_s - 1 / PER_S) < 1e-6
    assert keys.count("a", 10.0 + wait_s / 2) > 0, "who does not wait has not to wait longer for it"
    assert keys.count("a", 10.0 + wait_s) == 0
    assert keys.count("a", 10.0 + wait_s) > 0


def test_peers_have_budgets_of_their_own() -> None:
    keys = WrongKeys()
    for _ in range(BURST + 1):
        keys.count("a", 0.0)
    assert keys.count("b", 0.0) == 0


def test_the_table_is_bounded_and_keeps_those_that_are_at_it() -> None:
    keys = WrongKeys()
    for number in range(3 * MOST_PEERS):
        keys.count("busy", number * 0.001)
        keys.count(f"peer-{number}", number * 0.001)
    assert len(keys) == MOST_PEERS
    assert keys.count("busy", 3 * MOST_PEERS * 0.001) > 0


def test_a_clock_that_jumps_back_keeps_nobody_waiting_for_ever() -> None:
    keys = WrongKeys()
    for _ in range(BURST + 1):
        keys.count("a", 1e6)
    assert keys.count("a", 0.0) <= 1 / PER_S
    assert keys.count("a", 1 / PER_S) == 0
