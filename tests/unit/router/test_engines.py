"""Tests one model on workers of two engines: pairs never cross, and a stream that has begun does only where told."""

from __future__ import annotations

import pytest

from services.core.errors import NoWorker, UnsupportedModel
from services.router.coordinator.events import DecodeAdmitted, GroupsChanged, ImportFailed, LegFailed
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, Role
from tests.support.router_bench import BUSY, Bench, started, tokens

PRINTS = {
    "torch": Fingerprint("11111111aaaa", "float32 weights"),
    "vllm": Fingerprint("22222222bbbb", "float32 weights", "vllm"),
}
OTHER_WEIGHTS = Fingerprint("33333333cccc", "float32 weights")


def join(bench: Bench, engine: str, role: Role, name: str, *, incarnation: int = 1) -> None:
    bench.join(name, role, incarnation=incarnation, fingerprint=PRINTS[engine])


def bench_of(*engines: str, replay_across_engines: bool = False) -> Bench:
    """Returns a bench with a prefill and a decode worker of each engine."""
    bench = Bench(no_worker_timeout_s=5.0, replay_across_engines=replay_across_engines)
    for engine in engines:
        join_pair(bench, engine)
    return bench


def join_pair(bench: Bench, engine: str, *, incarnation: int = 1) -> None:
    join(bench, engine, Role.PREFILL, f"{engine}-p", incarnation=incarnation)
    join(bench, engine, Role.DECODE, f"{engine}-d", incarnation=incarnation)


def lose_pair(bench: Bench, engine: str) -> None:
    bench.lose(f"{engine}-p", crashed=False)
    bench.lose(f"{engine}-d", crashed=False)


def other(engine: str) -> str:
    return "vllm" if engine == "torch" else "torch"


def engine_of(worker_id: str) -> str:
    return worker_id.split("-")[0]


def test_both_serve_and_no_pair_crosses() -> None:
    bench = bench_of("torch", "vllm")
    engines = []
    for number in range(6):
        prefill, decode = bench.decoding(f"r{number}")
        engines.append(engine_of(prefill.worker_id))
        assert engine_of(decode.worker_id) == engines[-1]
        bench.load(prefill.worker_id, queued_prefill_tokens=100 * (number + 1))  # the other one is the better
    assert engines == ["torch", "vllm"] * 3


def test_a_prompt_runs_apart_only_where_its_own_engine_takes_over() -> None:
    bench = bench_of()
    join(bench, "torch", Role.PREFILL, "torch-p")
    bench.submit()
    join(bench, "vllm", Role.PREFILL, "vllm-p")
    assert bench.phase() is Phase.QUEUED
    join(bench, "vllm", Role.DECODE, "vllm-d")
    assert bench.take_leg(Role.PREFILL).worker_id == "vllm-p"


@pytest.mark.parametrize("engine", PRINTS)
@pytest.mark.parametrize("across", [False, True])
def test_before_the_first_token_a_retry_goes_to_any_engine(engine: str, across: bool) -> None:
    bench = bench_of(engine, replay_across_engines=across)
    _, decode = bench.handed_over()
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    join_pair(bench, other(engine))
    lose_pair(bench, engine)
    prefill = bench.take_leg(Role.PREFILL)
    assert (engine_of(prefill.worker_id), prefill.output_base) == (other(engine), 0)
    bench.finish(prefill, [201, 202])


@pytest.mark.parametrize("engine", PRINTS)
def test_after_it_a_stream_waits_for_its_engine_and_fails_by_its_name(engine: str) -> None:
    bench = bench_of(engine)
    bench.decoding()
    join_pair(bench, other(engine))
    lose_pair(bench, engine)
    for _ in range(49):
        bench.wait(0.1)
    assert bench.phase() is Phase.QUEUED
    assert len(bench.take_legs(Role.PREFILL)) == 0
    bench.wait(0.2)
    error = bench.failed["r"]
    assert isinstance(error, NoWorker)
    assert f"began on workers of fingerprint {PRINTS[engine].short} ({engine}; float32 weights)" in str(error)
    assert f"compute differently: {PRINTS[other(engine)]}; with --replay-across-engines the router" in str(error)
    bench.assert_idle()


def test_its_engine_takes_it_when_it_is_back() -> None:
    bench = bench_of("torch", "vllm")
    _, decode = bench.decoding()
    engine = engine_of(decode.worker_id)
    lose_pair(bench, engine)
    bench.wait(1.0)
    assert bench.phase() is Phase.QUEUED
    join_pair(bench, engine, incarnation=2)
    replay = bench.take_leg(Role.PREFILL)
    assert (engine_of(replay.worker_id), replay.output_base) == (engine, 1)


def test_the_flag_is_no_use_where_the_others_are_of_the_same_engine() -> None:
    """They may compute with other weights: nobody has said that they compute the same."""
    bench = bench_of("torch", replay_across_engines=True)
    bench.decoding()
    bench.join("q", Role.MIXED, fingerprint=OTHER_WEIGHTS)
    lose_pair(bench, "torch")
    bench.wait(1.0)
    assert bench.phase() is Phase.QUEUED
    bench.wait(5.0)
    bench.wait(0.1)
    assert "--replay-across-engines" not in str(bench.failed["r"])
    assert str(OTHER_WEIGHTS) in str(bench.failed["r"])


def test_with_the_flag_a_stream_goes_on_with_the_other_engine_and_comes_back() -> None:
    bench = bench_of("torch", replay_across_engines=True)
    bench.decoding()
    join_pair(bench, "vllm")
    lose_pair(bench, "torch")
    replay = bench.take_leg(Role.PREFILL)
    assert (replay.worker_id, replay.output_base) == ("vllm-p", 1)
    bench.say("vllm-p", started(replay), tokens(replay, 201))
    decode = bench.take_leg(Role.DECODE)
    assert decode.worker_id == "vllm-d"
    bench.say("vllm-d", DecodeAdmitted(decode.leg))
    join_pair(bench, "torch", incarnation=2)
    lose_pair(bench, "vllm")
    back = bench.take_leg(Role.PREFILL)
    assert (back.worker_id, back.output_base) == ("torch-p", 2)
    bench.finish(back, [100, 201, 201, 202])


def test_with_the_flag_a_stream_still_stays_with_its_like_while_one_is_left_even_a_busy_one() -> None:
    bench = bench_of("torch", replay_across_engines=True)
    bench.decoding()
    bench.join("torch-m", Role.MIXED, fingerprint=PRINTS["torch"])
    bench.load("torch-m", **BUSY)
    join_pair(bench, "vllm")
    lose_pair(bench, "torch")
    bench.wait(1.0)
    assert bench.phase() is Phase.QUEUED, "it waits for room"
    bench.load("torch-m", num_running=0, blocks_active=0, num_waiting=0, blocks_free=64)
    bench.wait(0.1)
    assert bench.take_leg(Role.PREFILL).worker_id == "torch-m"


def test_two_engines_are_named_and_are_no_mistake() -> None:
    bench = bench_of("torch", "vllm")
    bench.wait(0.1)
    change = bench.take(GroupsChanged)
    assert [(group.engine, group.worker_ids) for group in change.groups] == [
        ("torch", ("torch-d", "torch-p")),
        ("vllm", ("vllm-d", "vllm-p")),
    ]
    assert change.are_engines
    bench.join("q", Role.MIXED, fingerprint=OTHER_WEIGHTS)
    bench.wait(0.1)
    assert not bench.take(GroupsChanged).are_engines


NOT_SERVED = UnsupportedModel("a worker of this engine has no masks")


def refused_by(bench: Bench, *engines: str) -> None:
    """Has the engines say, one after the other, that they do not serve the request."""
    for engine in engines:
        prefill = bench.take_leg(Role.PREFILL)
        assert engine_of(prefill.worker_id) == engine
        bench.say(prefill.worker_id, LegFailed(prefill.leg, NOT_SERVED))


def test_what_one_engine_does_not_serve_goes_to_the_other_and_is_nobodys_fault() -> None:
    bench = bench_of("torch", "vllm")
    bench.submit()
    refused_by(bench, "torch")
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.worker_id == "vllm-p"
    assert all(worker.takes_requests for worker in bench.coordinator.workers.all())
    bench.finish(prefill, [201, 202])
    assert bench.finished["r"].summary.num_retries == 0


def test_what_no_engine_serves_fails_by_what_the_last_one_says() -> None:
    bench = bench_of("torch", "vllm")
    bench.submit()
    refused_by(bench, "torch", "vllm")
    assert bench.failed["r"] is NOT_SERVED
    bench.assert_idle()


@pytest.mark.parametrize("of_import", [False, True])
def test_a_decode_worker_that_does_not_serve_it_ends_the_handoff_too(of_import: bool) -> None:
    bench = bench_of("torch", "vllm")
    prefill, decode = bench.handed_over()
    failed = ImportFailed(decode.leg, True, NOT_SERVED) if of_import else LegFailed(decode.leg, NOT_SERVED)
    bench.say(decode.worker_id, failed)
    again = bench.take_leg(Role.PREFILL)
    assert (engine_of(prefill.worker_id), engine_of(again.worker_id)) == ("torch", "vllm")
    bench.finish(again, [201, 202])


def test_a_stream_that_has_begun_ends_where_its_engine_says_so_unless_it_may_cross() -> None:
    for across in (False, True):
        bench = bench_of("torch", "vllm", replay_across_engines=across)
        _, decode = bench.decoding()
        bench.say(decode.worker_id, LegFailed(decode.leg, NOT_SERVED))
        if across:
            replay = bench.take_leg(Role.PREFILL)
            assert (replay.worker_id, replay.output_base) == ("vllm-p", 1)
        else:
            assert bench.failed["r"] is NOT_SERVED


def test_one_that_waits_for_the_engine_that_serves_it_is_told_so() -> None:
    bench = bench_of("torch", "vllm")
    bench.submit()
    refused_by(bench, "torch")
    lose_pair(bench, "vllm")
    assert bench.phase() is Phase.QUEUED
    bench.wait(4.0)
    join_pair(bench, "vllm", incarnation=2)
    assert bench.take_legs(Role.PREFILL)[-1].worker_id == "vllm-p"
    lose_pair(bench, "vllm")
    bench.wait(0.1)
    bench.wait(6.0)
    bench.wait(0.1)
    assert isinstance(bench.failed["r"], NoWorker)
    assert "workers of torch do not serve such a request" in str(bench.failed["r"])


def test_what_waits_for_another_engine_holds_up_nobody() -> None:
    bench = bench_of("torch", "vllm")
    for number in range(bench.coordinator.config.max_overtaken + 1):
        bench.submit(f"r{number}")
        refused_by(bench, "torch")
        bench.take_leg(Role.PREFILL)  # at the other, which dies
    lose_pair(bench, "vllm")
    bench.submit("later")
    assert [leg.spec.request_id for leg in bench.take_legs(Role.PREFILL)] == ["later"]
