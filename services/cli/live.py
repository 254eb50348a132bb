"""Reads the last hour of a running router as a workload: what `baton plan --live` plans for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.v1 import control_pb2
from services.cli.calibrate import profile_of, workers_of
from services.cli.client import Tls, control
from services.core.config import DAY_S
from services.core.errors import BatonError, ConfigError
from services.sim.profile import WorkerProfile
from services.sim.report import Objective
from services.sim.trace import TracedRequest

_MOST_RECENT = 65_536
"""As many as a router remembers of a model (`ControlService.ListRecentRequests`)."""


@dataclass(frozen=True)
class LiveWorkload:
    trace: list[TracedRequest]
    profile: WorkerProfile | None
    """What the workers have measured of themselves; None if that was not asked for."""
    attainment: tuple[int, int]
    """How many requests were within the objective, and how many there were."""


def read_live(
    target: str,
    token_file: str,
    timeout_s: float | None,
    objective: Objective,
    model: str,
    *,
    with_profile: bool,
    tls: Tls | None = None,
) -> LiveWorkload:
    """Returns what the router has served of a model, its own if `model` is empty.

    Raises ConfigError if too few requests have come; NoWorker if a profile is asked for and no worker has measured its
    steps; BatonError for an answer that cannot be.
    """
    with control(target, token_file, tls) as call:
        recent = call("ListRecentRequests", control_pb2.ListRecentRequestsRequest(model=model), timeout_s).requests
        status = call("GetStatus", control_pb2.GetStatusRequest(), timeout_s)
    if len(recent) < 2:
        raise ConfigError(f"--live: {target} has had {len(recent)} requests in the last hour, too few to plan for")
    if len(recent) > _MOST_RECENT or any(not _can_be(each) for each in recent):
        raise BatonError(f"{target}: what it says of its last hour cannot be")
    good = sum(_met(objective, each) for each in recent)
    profile = profile_of(workers_of(status, model), cost_per_hour=1.0) if with_profile else None
    return LiveWorkload(workload_of(recent), profile, (good, len(recent)))


def workload_of(recent: Sequence[Any]) -> list[TracedRequest]:
    """Returns the requests, in the order of their arrival. One that failed counts with the output that it had asked
    for, but no more than usual: it would have ended by itself."""
    usual = statistics.median([each.output_tokens for each in recent if not each.failed] or [1])
    first_us = max(each.age_us for each in recent)
    requests = []
    for each in recent:
        output_tokens = each.output_tokens
        if each.failed:
            most = each.max_tokens if each.HasField("max_tokens") else usual
            output_tokens = max(output_tokens, min(most, usual))
        at_s = (first_us - each.age_us) / 1e6
        requests.append(
            TracedRequest(at_s, max(1, each.prompt_tokens), max(1, round(output_tokens)), priority=each.priority)
        )
    return sorted(requests, key=lambda request: request.at_s)


def _met(objective: Objective, request: Any) -> bool:
    if request.failed or not request.HasField("ttft_us") or request.ttft_us > objective.ttft_s * 1e6:
        return False
    num_after = int(request.output_tokens) - 1
    return num_after < 1 or bool((request.total_us - request.ttft_us) / num_after <= objective.tpot_s * 1e6)


def _can_be(request: Any) -> bool:
    lengths = (request.prompt_tokens, request.output_tokens, request.max_tokens, request.ttft_us, request.total_us)
    return bool(min(lengths) >= 0 and 0 <= request.age_us <= DAY_S * 1e6)
