"""Tests the cluster in virtual time: the same each time, nothing lost, and what the cost model says by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.router.coordinator.config import CoordinatorConfig
from services.sim import cluster, worker
from services.sim.cluster import MESSAGE_S, Outcome, SimPlan, simulate
from services.sim.profile import WorkerProfile, read_profile, write_profile
from services.sim.report import Objective, as_json, summary, text
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest, synthetic_trace

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=10.0,
    ms_per_decode_sequence=1.0,
    ms_per_context_token=0.001,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e8,
)
SPLIT, MIXED = SimPlan(2, 2, 0, profile=PROFILE), SimPlan(0, 0, 4, profile=PROFILE)
SMALL = dataclasses.replace(PROFILE, num_blocks=160)
PATIENT = CoordinatorConfig(model_context_tokens=1 << 20, queue_timeout_s=1e9)
TIGHT = {
    "split": SimPlan(1, 2, 0, profile=SMALL),
    "mixed": SimPlan(0, 0, 3, profile=SMALL),
    "all kinds": SimPlan(1, 1, 1, profile=SMALL),
    "whole on decode workers": SimPlan(0, 2, 0, profile=SMALL),
}


def short(count: int, seed: int = 0) -> list[TracedRequest]:
    """Returns requests of which a small pool holds a few, ten a second."""
    trace = synthetic_trace(count, seed)
    return [TracedRequest(each.at_s / 10, min(each.prompt_tokens, 900), min(each.output_tokens, 300)) for each in trace]


def test_one_request_alone_takes_what_its_parts_cost() -> None:
    outcome = simulate(SimPlan(1, 1, 0, profile=PROFILE), [TracedRequest(0.0, 1000, 11)])
    (served,) = outcome.requests
    assert served.ttft_s == pytest.approx(0.1 + 2 * MESSAGE_S), "the prompt, the command and the token"
    assert served.total_s is not None
    assert served.ttft_s is not None
    # The blocks of the last chunk cross after the seal; then ten steps over a context that grows.
    last_chunk_s = 512 * 1000 / 1e8 + 0.001
    steps_s = 10 * 0.010 + sum(range(1001, 1011)) * 1e-6
    assert served.total_s - served.ttft_s == pytest.approx(last_chunk_s + steps_s, abs=2 * MESSAGE_S)
    assert outcome.bytes_moved == 1000 * 1000
    assert sum(outcome.gaps_s.values()) == 10


def test_blocks_cross_from_the_start_of_the_prompt_on_at_the_bandwidth_of_the_transport() -> None:
    slow = dataclasses.replace(PROFILE, transfer_bytes_per_s=1e6)
    (served,) = simulate(SimPlan(1, 1, 0, profile=slow), [TracedRequest(0.0, 1000, 11)]).requests
    steps_s = 10 * 0.010 + sum(range(1001, 1011)) * 1e-6
    # A second for 1000 tokens of 1000 bytes, of which the prompt hides a tenth.
    assert served.total_s == pytest.approx(1.0 + 0.001 + steps_s, abs=6 * MESSAGE_S)


def test_a_preempted_sequence_is_computed_again() -> None:
    """Lets two outputs grow until one is preempted. It goes on when the other has ended, and each of its tokens costs
    as much computed again as the step that it would have taken, but for those whose blocks the other did not need."""
    plan = SimPlan(0, 0, 1, profile=WorkerProfile("test", 10.0, 10.0, 0.0, num_blocks=24))
    trace = [TracedRequest(0.0, 160, 100)] * 2
    without = dataclasses.replace(plan, rules=WorkerRules(prefix_caching=False))
    differences_s = []
    for each in (without, plan):
        outcome = simulate(each, trace)
        assert outcome.num_preemptions == 1, "it would be in vain to begin again without room for the output"
        first_s, last_s = sorted(served.total_s or 0.0 for served in outcome.requests)
        differences_s.append(last_s - first_s)
        assert sum(outcome.gaps_s.values()) == 2 * 99
        assert max(outcome.gaps_s) > 0.5, "its stream stood still"
    assert differences_s[0] == pytest.approx((160 + 100) * 0.010, abs=0.025)
    # 24 blocks: the first ends with 259 computed tokens in 17 of them, so that seven are left of the second.
    assert differences_s[0] - differences_s[1] == pytest.approx(7 * 16 * 0.010)


@pytest.mark.parametrize("plan", [SPLIT, MIXED], ids=["split", "mixed"])
def test_the_same_trace_has_the_same_outcome(plan: SimPlan) -> None:
    first, second = (simulate(plan, synthetic_trace(300)) for _ in range(2))
    assert first == second
    assert simulate(plan, synthetic_trace(300, seed=1)) != first


@pytest.mark.parametrize(
    "name", ["mixed", *(pytest.param(name, marks=pytest.mark.long) for name in TIGHT if name != "mixed")]
)
def test_every_request_ends_once_and_no_block_is_left(name: str) -> None:
    """The pools hold a few sequences, so that there are refusals, parking and preemptions; `simulate` itself checks
    that the router and each worker have nothing left."""
    ended: list[int] = []
    outcome = simulate(TIGHT[name], short(400), ended.append)
    assert ended == list(range(1, 401))
    assert all((served.total_s is None) == bool(served.error) for served in outcome.requests)
    assert sum(served.total_s is not None for served in outcome.requests) > 50
    assert outcome.num_preemptions > 0 or name == "split"


@pytest.mark.long
def test_steps_taken_together_take_as_long_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares all tight clusters together: the router hears of steps at other times, and a decision of its own that
    falls otherwise changes what comes after it. What a worker does is compared step by step in `test_as_the_engine`."""
    together = [mean_total_s(simulate(plan, short(150))) for plan in TIGHT.values()]
    monkeypatch.setattr(worker, "_LONGEST_RUN_S", 1e-9)
    alone = [mean_total_s(simulate(plan, short(150))) for plan in TIGHT.values()]
    assert sum(together) == pytest.approx(sum(alone), rel=0.05)


def mean_total_s(outcome: Outcome) -> float:
    totals = [served.total_s for served in outcome.requests if served.total_s is not None]
    assert len(totals) == len(outcome.requests)
    return sum(totals) / len(totals)


@pytest.mark.long
def test_more_workers_serve_more() -> None:
    trace = [dataclasses.replace(each, at_s=each.at_s / 20) for each in synthetic_trace(400)]
    objective = Objective(1.0, 0.05)
    attained = [
        summary(plan, simulate(plan, trace), objective)["attainment"]
        for plan in (SimPlan(number, number, 0, profile=PROFILE) for number in (1, 2, 4))
    ]
    assert attained == sorted(attained)
    assert attained[0] < attained[-1]


def test_split_workers_keep_gaps_short_where_mixed_ones_do_not() -> None:
    """This is what splitting is for, with the same workers in both."""
    trace = [dataclasses.replace(each, at_s=each.at_s / 4) for each in synthetic_trace(400)]
    profile, objective = dataclasses.replace(PROFILE, ms_per_decode_sequence=0.1), Objective(2.0, 0.1)
    plans = (SimPlan(2, 2, 0, profile=profile), SimPlan(0, 0, 4, profile=profile))
    split, mixed = (summary(plan, simulate(plan, trace), objective) for plan in plans)
    assert split["itl_ms"]["p99"] < 0.6 * mixed["itl_ms"]["p99"]


def test_the_report_says_what_there_is() -> None:
    outcome = simulate(SPLIT, synthetic_trace(50))
    lines = text(summary(SPLIT, outcome, Objective(2.0, 0.1)))
    assert "2 prefill, 2 decode (test): 50 requests" in lines
    assert "failed: none" in lines


def test_profiles_are_kept_and_wrong_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    for content, reason in (
        ("{", "Expecting"),
        ("[]", "is no profile"),
        ('{"name": "x"}', "missing"),
        ('{"name": "x", "speed": 1}', "no profile has the field 'speed'; `baton calibrate` writes one"),
        ('{"name": "x", "\\u001b[31m": 1}', r"no profile has the field '\\x1b\[31m'"),
        ("[" * 200_000, "is no profile"),
        (path.read_text().replace("10.0", "-1"), "ms_per_decode_step is -1"),
        (path.read_text().replace("10.0", "NaN"), "ms_per_decode_step is nan"),
        (path.read_text().replace("4096", "0.5"), "num_blocks is 0.5"),
        (path.read_text().replace('"decode_points": []', '"decode_points": [[1, 5]]'), "decode_points must be two"),
        (path.read_text().replace('"decode_points": []', '"decode_points": [[2, 5], [1, 6]]'), "by growing size"),
        (path.read_text().replace('"decode_points": []', '"decode_points": [5]'), "bad.json: "),
        (path.read_text().replace('"decode_points": []', '"decode_points": [[1, "x"], [2, 6]]'), "bad.json: "),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            read_profile(bad)


def test_a_table_of_measurements_is_taken_point_by_point(tmp_path: Path) -> None:
    rows = ["model,hardware,prompt_size,batch_size,prompt_time,token_time,tensor_parallel"]
    rows += [
        f"m,h,{size},{batch},{5 + 0.2 * size * batch + noise},{30 + 2 * (batch - 1)},{gpus}"
        for size in (128, 512)
        for batch in (1, 4)
        for gpus, noise in ((8, -1), (8, 0), (8, 0.5), (4, 1000))
    ]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(rows) + "\n")
    profile = read_profile(path, "m:h")
    assert [size for size, _ in profile.prefill_points] == [128, 512, 2048]
    assert [ms for _, ms in profile.prefill_points] == pytest.approx([30.6, 107.4, 414.6])
    assert profile.decode_points == ((1, 30), (4, 36))
    assert profile.ms_per_prefill_token == pytest.approx(0.2)
    assert profile.ms_per_prefill_step == pytest.approx(5)
    assert profile.ms_per_decode_step == pytest.approx(30)
    assert profile.ms_per_decode_sequence == pytest.approx(2)
    assert read_profile(path, "m:h:4").prefill_ms(128) == pytest.approx(1030.6)
    assert profile.prefill_ms(320) == pytest.approx((30.6 + 107.4) / 2)
    assert profile.decode_ms(7) == pytest.approx(42), "beyond the last point the line goes on"
    assert profile.slowed(2.0).prefill_ms(320) == pytest.approx(2 * profile.prefill_ms(320))
    write_profile(tmp_path / "points.json", profile)
    assert read_profile(tmp_path / "points.json") == profile
    for name, reason in (("m:other", "has m:h; name one"), ("m:h:2", "m:h was measured on 4, 8 GPUs, not on 2")):
        with pytest.raises(ConfigError, match=reason):
            read_profile(path, name)


def test_the_parts_of_a_step_add_up() -> None:
    profile = dataclasses.replace(PROFILE, ms_per_prefill_step=3.0, ms_per_attended_token=0.0001)
    assert profile.step_s(100, 0, 0, 5000) == pytest.approx((3 + 10 + 0.5) / 1e3)
    assert profile.step_s(0, 4, 1000) == pytest.approx((10 + 3 + 1) / 1e3)
    assert profile.step_s(100, 4, 1000, 5000) == pytest.approx((13.5 + 3 + 1) / 1e3), "weights are read once"
    assert profile.step_s(10, 4, 1000) == pytest.approx((10 + 3 + 1) / 1e3)
    assert dataclasses.replace(profile, mixed_factor=1.1).step_s(96, 4, 1000) == pytest.approx(1.1 * 13 / 1e3)


def test_a_long_prompt_costs_more_by_its_attention_in_chunks_as_in_one() -> None:
    profile = dataclasses.replace(PROFILE, ms_per_attended_token=0.0001)
    for chunk in (128, 512, 4096):
        plan = SimPlan(1, 1, 0, profile=dataclasses.replace(profile, max_num_batched_tokens=chunk))
        (served,) = simulate(plan, [TracedRequest(0.0, 2000, 1)]).requests
        assert served.ttft_s == pytest.approx(0.2 + 2000 * 1000 * 0.0001 / 1e3 + 2 * MESSAGE_S)


def test_the_time_of_a_request_outside_of_workers_counts_before_its_first_token() -> None:
    profile = dataclasses.replace(PROFILE, ms_per_request=7.0)
    (served,) = simulate(SimPlan(1, 1, 0, profile=profile), [TracedRequest(0.0, 1000, 11)]).requests
    assert served.ttft_s == pytest.approx(0.107 + 2 * MESSAGE_S)


def test_what_is_infinite_is_null_in_json() -> None:
    """Serves requests none of which fits, with no bound of TPOT."""
    plan = SimPlan(1, 1, 0, profile=dataclasses.replace(PROFILE, max_model_len=512))
    figures = summary(plan, simulate(plan, [TracedRequest(0.0, 4000, 20)]), Objective(1.0, math.inf))
    assert figures["ttft_ms"]["p50"] == math.inf
    found = json.loads(as_json({"figures": figures, "rows": [(1, math.nan, "x", None)]}), parse_constant=pytest.fail)
    assert found["figures"]["ttft_ms"]["p50"] is None
    assert found["figures"]["objective_ms"] == {"ttft": 1000.0, "tpot": None}
    assert found["rows"] == [[1, None, "x", None]]


def test_a_simulation_that_comes_no_further_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses every command, under a router that would wait for thirty years."""
    plan = SimPlan(1, 1, 0, profile=PROFILE, router=PATIENT)
    trace = [TracedRequest(0.0, 100, 10), TracedRequest(1.0, 100, 10)]
    monkeypatch.setattr(cluster, "_PATIENCE_S", 300.0)
    assert len(simulate(plan, trace).requests) == 2
    monkeypatch.setattr(worker.SimWorker, "receive", lambda *command: None)
    with pytest.raises(AssertionError, match=r"2 requests live, and none has come any further for 30[0-9] s"):
        simulate(plan, trace)


def test_what_takes_its_time_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves a prompt for 100 s, and computes one for 90 s, where a standstill may last a second."""
    monkeypatch.setattr(cluster, "_PATIENCE_S", 1.0)
    slow = dataclasses.replace(PROFILE, transfer_bytes_per_s=1e4)
    (moved,) = simulate(SimPlan(1, 1, 0, profile=slow, router=PATIENT), [TracedRequest(0.0, 1000, 11)]).requests
    assert (moved.total_s or 0.0) > 90
    slow = dataclasses.replace(PROFILE, ms_per_prefill_token=90.0)
    (computed,) = simulate(SimPlan(0, 0, 1, profile=slow, router=PATIENT), [TracedRequest(0.0, 1000, 11)]).requests
    assert (computed.total_s or 0.0) > 80
