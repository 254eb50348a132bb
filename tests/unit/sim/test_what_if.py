"""Tests what may happen to simulated workers: they die and come back, or are slow; and that profiles may be changed."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from services.cli import simulate as command
from services.core.errors import ConfigError
from services.sim.cluster import Death, SimPlan, simulate
from services.sim.profile import WorkerProfile, read_profile, write_profile
from services.sim.report import Objective, summary
from services.sim.trace import TracedRequest, synthetic_trace

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=10.0,
    ms_per_decode_sequence=1.0,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e7,
    num_blocks=400,
)
SPLIT, MIXED, ALL = (
    SimPlan(2, 2, 0, profile=PROFILE),
    SimPlan(0, 0, 3, profile=PROFILE),
    SimPlan(1, 1, 1, profile=PROFILE),
)


def trace(count: int = 150) -> list[TracedRequest]:
    """Returns requests of which the pools hold some, eight a second."""
    return [
        TracedRequest(each.at_s / 8, min(each.prompt_tokens, 1500), min(each.output_tokens, 200))
        for each in synthetic_trace(count)
    ]


@pytest.mark.parametrize("plan", [SPLIT, MIXED, ALL], ids=["split", "mixed", "all kinds"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_whoever_dies_every_request_ends_once_with_all_its_tokens(plan: SimPlan, seed: int) -> None:
    """Kills workers at random moments. `simulate` itself checks the number of tokens, and that nothing is left."""
    rng = random.Random(seed)
    deaths = tuple(Death(rng.choice(plan.worker_ids), rng.uniform(0, 18)) for _ in range(4))
    plan = dataclasses.replace(plan, deaths=deaths, cold_start_s=rng.choice([0.5, 3.0]))
    first = simulate(plan, trace())
    assert len(first.requests) == 150
    assert all((served.total_s is not None) != bool(served.error) for served in first.requests)
    assert sum(served.num_retries for served in first.requests) > 0, "somebody was computed again"
    assert sum(bool(served.error) for served in first.requests) <= 2, "three crashes under one request end it"
    assert simulate(plan, trace()) == first


def test_tokens_that_came_before_a_death_are_not_computed_as_output_again() -> None:
    """Kills the worker of a request that has decoded for 1 s; another takes its prompt and output over."""
    plan = dataclasses.replace(SimPlan(1, 2, 0, profile=PROFILE), deaths=(Death("decode-0", 1.1),))
    (served,) = simulate(plan, [TracedRequest(0.0, 500, 150)]).requests
    (undisturbed,) = simulate(dataclasses.replace(plan, deaths=()), [TracedRequest(0.0, 500, 150)]).requests
    assert served.num_retries == 1
    assert served.ttft_s == undisturbed.ttft_s
    assert served.total_s is not None
    assert undisturbed.total_s is not None
    # Prompt and about 100 tokens are computed and moved again: 0.6 k tokens, 60 ms each; not the 100 steps of 10 ms.
    assert 0.06 < served.total_s - undisturbed.total_s < 0.4


@pytest.mark.long
def test_a_worker_that_does_not_come_back_leaves_the_work_to_others_or_to_nobody() -> None:
    lost = dataclasses.replace(SPLIT, deaths=(Death("decode-1", 2.0),), cold_start_s=math.inf)
    outcome = simulate(lost, trace())
    assert not any(served.error for served in outcome.requests)
    assert outcome.busy["decode-1"] < simulate(SPLIT, trace()).busy["decode-1"] / 2
    alone = dataclasses.replace(
        SimPlan(1, 1, 0, profile=PROFILE), deaths=(Death("decode-0", 2.0),), cold_start_s=math.inf
    )
    figures = summary(alone, simulate(alone, trace()), Objective(1.0, 1.0))
    assert sum(figures["num_failed"].values()) > 100


def test_the_end_of_a_request_that_fails_is_an_end() -> None:
    """Kills the only decode worker for good: the requests fail only once the router has waited for another."""
    plan = dataclasses.replace(
        SimPlan(1, 1, 0, profile=PROFILE), deaths=(Death("decode-0", 0.2),), cold_start_s=math.inf
    )
    outcome = simulate(plan, [TracedRequest(0.0, 500, 150), TracedRequest(0.01, 500, 150)])
    assert all(served.error for served in outcome.requests)
    assert outcome.seconds > 1.0
    assert all(0 < share < 1 for share in outcome.busy.values())
    figures = summary(plan, outcome, Objective(1.0, 1.0))
    assert figures["cost"] == pytest.approx(2 * outcome.seconds / 3600)


def test_workers_are_not_busy_after_the_last_end() -> None:
    """Lets a request fail while its worker is in a step of a thousand seconds."""
    profile = dataclasses.replace(PROFILE, ms_per_decode_step=1e6)
    outcome = simulate(SimPlan(1, 1, 0, profile=profile), [TracedRequest(0.0, 500, 20)])
    assert [served.error for served in outcome.requests] != [""]
    assert outcome.seconds < 1000
    assert 0.5 < outcome.busy["decode-0"] <= 1


def test_a_request_that_takes_days_is_refused() -> None:
    slow = dataclasses.replace(SPLIT, slowness=(("prefill-0", 1e6),))
    with pytest.raises(
        ConfigError, match=r"the longest request alone takes 1.6e\+06 s by these profiles, more than a day"
    ):
        simulate(slow, [TracedRequest(0.0, 500, 150)])


def test_steps_of_no_time_at_all_end() -> None:
    tiny = dataclasses.replace(PROFILE, ms_per_decode_step=1e-318, ms_per_decode_sequence=0, ms_per_context_token=0)
    (served,) = simulate(SimPlan(0, 0, 1, profile=tiny), [TracedRequest(0.0, 500, 150)]).requests
    assert not served.error


def test_a_slow_worker_is_given_less() -> None:
    slow = dataclasses.replace(SimPlan(1, 2, 0, profile=PROFILE), slowness=(("decode-1", 4.0),))
    alike = dataclasses.replace(slow, slowness=())
    objective = Objective(1.0, 1.0)
    assert (
        summary(slow, simulate(slow, trace()), objective)["tpot_ms"]["p95"]
        > summary(alike, simulate(alike, trace()), objective)["tpot_ms"]["p95"]
    )
    assert PROFILE.slowed(4.0).ms_per_decode_step == 40.0
    assert PROFILE.slowed(4.0).num_blocks == PROFILE.num_blocks


def test_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "profile.json")
    write_profile(Path(path), PROFILE)
    flags = ["--profile", path, "--requests", "60", "--prefill", "1", "--decode", "2"]

    def run(*more: str) -> str:
        assert command.main([*flags, *more, "--json", "-"], "baton simulate") == 0
        return capsys.readouterr().out

    plain = run()
    assert run("--slow", "decode-1=1") == plain
    for more in (
        ["--die", "decode-0@5"],
        ["--die", "decode-0@5", "--die", "prefill-0@9", "--cold-start-s", "2"],
        ["--die", "decode-0@5", "--cold-start-s", "inf"],
        ["--slow", "prefill-0=3"],
        ["--set", "transfer_bytes_per_s=1e6"],
        ["--set", "num_blocks=300", "--set", "max_num_batched_tokens=4096"],
    ):
        assert run(*more) != plain, more


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--die", "decode-7@5"], "--die: 'decode-7@5' names no worker; there are prefill-0, decode-0, decode-1"),
        (["--die", "decode-0@soon"], "--die: 'decode-0@soon' is not like decode-0@2"),
        (["--die", "decode-0@inf"], "--die: 'decode-0@inf' is not like decode-0@2"),
        (["--slow", "decode-0=0"], "--slow: 'decode-0=0' is not like decode-0=2"),
        (["--slow-factor", "1"], "--slow-factor: 1.0 must be 0, or above 1"),
        (["--slow", "decode-0"], "--slow: 'decode-0' is not like decode-0=2"),
        (["--cold-start-s", "nan"], "--cold-start-s: 'nan' is not a number"),
        (["--rate-scale", "1e-9"], "--rate-scale: the last request arrives after"),
        (["--set", "blocks=3"], "--set: 'blocks=3' names no field; there are ms_per_prefill_token"),
        (["--set", "num_blocks=x"], "--set: 'num_blocks=x': 'x' is no number"),
        (["--set", "num_blocks=0"], "num_blocks is 0, which is out of range"),
        (["--set", "num_blocks=1.5"], "--set: 'num_blocks=1.5'"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, more: list[str], reason: str) -> None:
    path = str(tmp_path / "profile.json")
    write_profile(Path(path), PROFILE)
    with pytest.raises(ConfigError, match=reason):
        command.main(["--profile", path, "--prefill", "1", "--decode", "2", *more], "baton simulate")
    assert read_profile(Path(path)) == PROFILE
