"""Tests that a tenant over its share leaves room at workers to others, and that who is behind goes first there."""

from __future__ import annotations

from services.router.coordinator.events import DecodeAdmitted, FinishReason, ImportReady
from services.router.policy import Role
from services.router.policy.shares import CREDIT, OUTPUT_COST, PROMPT_COST, RECENT_S
from tests.support.router_bench import Bench, started, tokens

PLACES = 8
KEPT = 2
"""A quarter of the batch."""


def unsplit() -> Bench:
    bench = Bench()
    bench.join("d", Role.DECODE, max_num_seqs=PLACES, num_blocks=640)
    return bench


def flood(bench: Bench, number: int) -> int:
    """Sends so many requests of one tenant. Returns how many begin; these never end."""
    for index in range(number):
        bench.submit(f"flood{index}", tenant="flood")
    begun = bench.take_legs(Role.DECODE)
    bench.load("d", num_running=len(begun), blocks_active=100, blocks_free=540)
    bench.say("d", *(DecodeAdmitted(command.leg) for command in begun))
    return len(begun)


def test_a_tenant_alone_may_have_all_of_a_worker() -> None:
    assert flood(unsplit(), 20) == PLACES


def test_beside_another_a_flood_leaves_room_and_takes_it_when_the_other_is_long_gone() -> None:
    bench = unsplit()
    bench.submit("light", tenant="light")
    light = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(light.leg), tokens(light, 1, finish=FinishReason.STOP))
    assert flood(bench, 20) == PLACES - KEPT
    for number in range(KEPT):
        bench.submit(f"light{number}", tenant="light")
    lights = bench.take_legs(Role.DECODE)
    assert [command.spec.tenant for command in lights] == ["light"] * KEPT, "it does not wait"
    for command in lights:
        bench.say("d", DecodeAdmitted(command.leg), tokens(command, 1, finish=FinishReason.STOP))
    assert not bench.take_legs(Role.DECODE), "the room is kept"
    bench.beat("d", RECENT_S + 1.0)
    assert len(bench.take_legs(Role.DECODE)) == KEPT


def test_a_small_share_of_others_keeps_a_small_part_of_the_room() -> None:
    bench = unsplit()
    bench.submit("light", tenant="light")
    light = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(light.leg), tokens(light, 1, finish=FinishReason.STOP))
    for index in range(20):
        bench.submit(f"flood{index}", tenant="flood", weight=99.0)
    assert len(bench.take_legs(Role.DECODE)) == PLACES - 1


def test_a_large_handoff_finds_room_beside_the_little_that_others_have_all_the_time() -> None:
    """Uses a decode worker that both fit together, but with less than its headroom left."""
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=640)
    bench.join("d", Role.DECODE)
    bench.decoding("small", tenant="light")
    bench.load("d", num_running=1, blocks_active=2, blocks_free=62)
    bench.submit("large", num_tokens=800, tenant="heavy")
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 1))
    assert bench.take_leg(Role.DECODE).spec.request_id == "large"


def test_who_is_behind_goes_first_at_the_worker_whatever_the_others_priority() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=640)
    bench.join("d", Role.DECODE, num_blocks=640)
    for number in range(4):
        bench.submit(f"flood{number}", num_tokens=100, tenant="flood", priority=100)
    bench.submit("light", tenant="light", priority=-100)
    by_id = {command.spec.request_id: command for command in bench.take_legs(Role.PREFILL)}
    assert by_id["light"].priority > by_id["flood0"].priority == 100
    assert not by_id["flood0"].goes_ahead


def test_who_has_spent_its_credit_waits_in_turn() -> None:
    bench = Bench(model_context_tokens=1 << 20)
    bench.join("d", Role.DECODE, num_blocks=1 << 14, max_model_len=1 << 17, max_num_seqs=64)
    for number in range(2):
        bench.submit(f"flood{number}", num_tokens=100, tenant="flood")
    bench.submit("long", num_tokens=int(CREDIT) + 200, tenant="light")
    bench.submit("next", tenant="light")
    sent = {command.spec.request_id: command.goes_ahead for command in bench.take_legs(Role.DECODE)}
    assert sent == {"flood0": False, "flood1": False, "long": True, "next": False}


def test_a_handoff_of_who_is_behind_is_placed_first() -> None:
    """The decode worker's batch is full; the flood's handoff has waited longer."""
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=640)
    bench.join("d", Role.DECODE, max_num_seqs=1, num_blocks=640)
    bench.submit("first", tenant="flood")
    first = bench.take_leg(Role.PREFILL)
    bench.say("p", started(first))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(first, 1))
    bench.say("d", ImportReady(decode.leg), tokens(decode, 1))
    bench.load("d", num_running=1, blocks_active=4, blocks_free=636)
    bench.submit("flood", tenant="flood")
    bench.say("p", started(bench.take_leg(Role.PREFILL)))
    bench.submit("light", tenant="light")
    bench.say("p", started(bench.take_leg(Role.PREFILL)))
    bench.take_legs(Role.DECODE)
    bench.say("d", tokens(decode, 2, at=1, finish=FinishReason.STOP))
    bench.load("d", num_running=0, blocks_active=0, blocks_free=640)
    asked = [command.spec.request_id for command in bench.take_legs(Role.DECODE)]
    assert asked[:1] == ["light"]


def test_a_flood_fills_half_of_the_line_beside_another() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL, num_blocks=6400)
    bench.join("d", Role.DECODE, num_blocks=6400, max_num_seqs=64)
    bench.submit("light", tenant="light")
    bench.cancel("light")
    for number in range(20):
        bench.submit(f"flood{number}", num_tokens=1000, tenant="flood")
    most = bench.coordinator.config.policy.max_queued_tokens
    begun = [command for command in bench.take_legs(Role.PREFILL) if command.spec.tenant == "flood"]
    assert most / 2 <= 1000 * len(begun) < most / 2 + 1000


def test_who_begins_to_wait_has_no_more_than_its_credit() -> None:
    bench = Bench(model_context_tokens=1 << 17)
    bench.join("d", Role.DECODE, num_blocks=1 << 14, max_model_len=1 << 17)
    for number in range(2):
        bench.submit(f"flood{number}", num_tokens=int(CREDIT) + 100, tenant="flood")
    bench.submit("light", num_tokens=10, tenant="light")
    assert bench.share("light").served == 100 + 10


def test_the_parts_of_a_request_are_not_charged_its_prompt_again() -> None:
    bench = Bench()
    bench.join("d", Role.DECODE)
    bench.submit(num_tokens=100, num_answers=2, tenant="a")
    command = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeAdmitted(command.leg), tokens(command, 1), tokens(command, 1, index=1))
    share = bench.share("a")
    bench.lose("d")
    bench.join("d", Role.DECODE, incarnation=2)
    bench.wait(3.0)
    assert len(bench.take_legs(Role.DECODE)) == 2
    assert share.served == PROMPT_COST * 100 + OUTPUT_COST * 2
