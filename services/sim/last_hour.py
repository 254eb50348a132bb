"""Makes a workload of what a running router has served in the last hour, which `baton plan --live` plans for."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from services.sim.report import Objective
from services.sim.trace import TracedRequest


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


def num_good(recent: Sequence[Any], objective: Objective) -> int:
    """Returns how many of the requests were within the objective."""
    return sum(_met(objective, each) for each in recent)


def _met(objective: Objective, request: Any) -> bool:
    if request.failed or not request.HasField("ttft_us") or request.ttft_us > objective.ttft_s * 1e6:
        return False
    num_after = int(request.output_tokens) - 1
    return num_after < 1 or bool((request.total_us - request.ttft_us) / num_after <= objective.tpot_s * 1e6)
