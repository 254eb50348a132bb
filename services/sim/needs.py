"""Counts how many workers a workload keeps busy at least, and what no number of them can do.

Both are bounds that no cluster beats, however well its work is spread, so that a search need not simulate it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from services.router.policy import Split
from services.sim.cluster import SimPlan
from services.sim.goal import METRICS, Goal
from services.sim.profile import Points, WorkerProfile
from services.sim.trace import TracedRequest


@dataclass(frozen=True)
class Needs:
    """Says how many workers the work keeps busy at least, however well it is spread: 3.9, for example, of which it is
    three, so that a little too few are tried as well."""

    prompts: float
    """Prefill or mixed workers, if they compute all prompts."""
    prompts_on_decode: float
    """Decode workers, if they do."""
    outputs: float
    """Decode workers, if they compute all output."""
    outputs_on_mixed: float
    """Mixed ones, if they do: their steps cost something else if decode workers have a profile of their own."""
    prompts_run_apart: bool
    """Whether decode workers compute no prompts (`--split always`)."""

    def allow(self, plan: SimPlan) -> bool:
        """Returns whether the plan's workers may be enough. A worker that does both counts whole for each phase, since
        a step with prompts and sequences may cost no more than one with either."""
        prefill, decode = float(plan.prefill + plan.mixed), float(plan.decode)
        if not self.prompts_run_apart and self.prompts_on_decode:
            prefill += plan.decode * self.prompts / self.prompts_on_decode
        if plan.mixed and self.outputs_on_mixed:
            decode += plan.mixed * self.outputs / self.outputs_on_mixed
        return prefill >= math.floor(self.prompts) and decode >= math.floor(self.outputs)

    def fewest(self, plan: SimPlan) -> SimPlan:
        """Returns the plan with as many workers of each role as may be enough, in a split and in a mixed cluster."""
        prompts, decode, on_mixed = (
            max(1, math.floor(need)) for need in (self.prompts, self.outputs, self.outputs_on_mixed)
        )
        prefill = prompts if self.prompts_run_apart else 1
        return dataclasses.replace(plan, prefill=prefill, decode=decode, mixed=max(prompts, on_mixed))


def needs(trace: Sequence[TracedRequest], plan: SimPlan, goal: Goal) -> Needs:
    """Returns what the trace needs of the plan's kinds of workers to meet the goal."""
    of_decode = plan.decode_profile or plan.profile
    prompts, outputs = _needs_on(trace, plan.profile, of_decode, goal, plan.router.queue_timeout_s)
    on_decode, _ = _needs_on(trace, of_decode, of_decode, goal, plan.router.queue_timeout_s)
    _, on_mixed = _needs_on(trace, plan.profile, plan.profile, goal, plan.router.queue_timeout_s)
    return Needs(prompts, on_decode, outputs, on_mixed, plan.router.split is Split.ALWAYS)


def _needs_on(
    trace: Sequence[TracedRequest], of_prefill: WorkerProfile, of_decode: WorkerProfile, goal: Goal, wait_s: float
) -> tuple[float, float]:
    """Returns how many workers of the one profile the prompts keep busy at least, and how many of the other the
    outputs. Nobody waits longer than `wait_s` in the router."""
    if not trace or any(request.block_ids for request in trace):
        return 0.0, 0.0  # caches may save most of it
    last_s, longest = trace[-1].at_s, max(request.output_tokens for request in trace)
    # Nobody may wait longer than the router lets him, once for each phase; then the longest output takes its steps. A
    # little too few workers are tried as well.
    steps_s = longest * of_decode.decode_ms(of_decode.max_num_seqs) / 1e3
    # So many of a hundred requests must not fail.
    percent = max((percent for metric in METRICS for percent, _ in goal.bounds_of(metric)), default=0)
    prefill_s = work_s(_shortest(trace, percent, "prompt_tokens"), of_prefill, of_decode)[0]
    decode_s = work_s(_shortest(trace, percent, "output_tokens"), of_prefill, of_decode)[1]
    # The longest prompt may begin as late as that.
    longest_s = _alone_ms(of_prefill, max(request.prompt_tokens for request in trace)) / 1e3
    prompts = [0.8 * prefill_s / (last_s + wait_s + longest_s)]
    outputs = [0.8 * decode_s / (last_s + 2 * wait_s + steps_s)]
    for percent, bound_s in goal.bounds_of("ttft"):
        until_s = last_s + bound_s
        some = _shortest(trace, percent, "prompt_tokens")
        prompts.append(work_s(some, of_prefill, of_decode)[0] / until_s)
        for of_tpot, tpot_s in goal.bounds_of("tpot"):
            some = _shortest(trace, percent + of_tpot - 100, "output_tokens")
            outputs.append(work_s(some, of_prefill, of_decode)[1] / (until_s + longest * tpot_s))
    return max(prompts), max(outputs)


def work_s(trace: Sequence[TracedRequest], prefill: WorkerProfile, decode: WorkerProfile) -> tuple[float, float]:
    """Returns the seconds that the trace's prompts keep one worker busy at least, and its outputs another."""
    chunk = prefill.max_num_batched_tokens
    whole_ms = _least_each(prefill.prefill_ms, prefill.prefill_points, chunk)
    token_ms = _least_each(decode.decode_ms, decode.decode_points, decode.max_num_seqs)
    if decode.mixed_factor:  # a sequence costs what a token of a prompt does, in steps that have one
        most = decode.max_num_batched_tokens + decode.max_num_seqs
        token_ms = min(token_ms, decode.mixed_factor * _least_each(decode.prefill_ms, decode.prefill_points, most))
    prefill_s = sum(request.prompt_tokens for request in trace) * whole_ms / 1e3
    # The first token is of the prompt's last step.
    return prefill_s, sum(max(0, request.output_tokens - 1) for request in trace) * token_ms / 1e3


def _least_each(cost_ms: Callable[[int], float], points: Points, most: int) -> float:
    """Returns the least that each of up to `most` costs that are in a step together: at `most`, or at a measured point,
    between which costs are on a line."""
    return max(0.0, min(cost_ms(size) / size for size in _sizes(points, most)))


def _sizes(points: Points, most: int) -> set[int]:
    return {1, most, *(int(size) for size, _ in points if 1 <= size <= most)}


def _shortest(trace: Sequence[TracedRequest], percent: int, length: str) -> Sequence[TracedRequest]:
    """Returns the least work that `percent` of the requests can be: those of the smallest `length`."""
    return sorted(trace, key=attrgetter(length))[: max(0, percent) * len(trace) // 100]


def out_of_reach(trace: Sequence[TracedRequest], plan: SimPlan, goal: Goal) -> dict[str, float]:
    """Returns the bounds that more workers do not help to meet, each with what a request takes that has an idle worker
    for itself, in milliseconds: of `ttft`, the computing of the prompt that just has to meet the bound. Returns nothing
    where steps of more cost less, so that a request may take less in company."""
    profiles = [plan.profile, plan.decode_profile or plan.profile]
    if not trace or not all(profile.steps_grow for profile in profiles):
        return {}
    prompts = sorted(request.prompt_tokens for request in trace)
    has_gaps = any(request.output_tokens > 1 for request in trace)
    may_be_cached = any(request.block_ids for request in trace)
    found = {}
    for name, bound_ms in goal.bounds_ms.items():
        metric, _, percent = name.partition("_p")
        if metric == "ttft" and not may_be_cached:
            num_tokens = prompts[-(-int(percent) * len(prompts) // 100) - 1]
            least_ms = min(_alone_ms(profile, num_tokens) for profile in profiles)
        elif metric in ("tpot", "itl") and has_gaps:
            least_ms = min(_least_step_ms(profile) for profile in profiles)
        else:
            continue
        if least_ms > bound_ms:
            found[name] = least_ms
    return found


def _least_step_ms(profile: WorkerProfile) -> float:
    """Returns the milliseconds of the shortest step that has a sequence: by itself, or beside a token of a prompt."""
    alone_ms = profile.decode_ms(1)
    return min(alone_ms, profile.mixed_factor * profile.prefill_ms(2)) if profile.mixed_factor else alone_ms


def _alone_ms(profile: WorkerProfile, num_tokens: int) -> float:
    """Returns the milliseconds of a prompt's steps on a worker that does nothing else, or, if that is less, beside
    sequences."""
    whole, rest = divmod(num_tokens, profile.max_num_batched_tokens)
    attended_ms = num_tokens * num_tokens / 2 * profile.ms_per_attended_token
    alone_ms = whole * profile.prefill_ms(profile.max_num_batched_tokens) + profile.prefill_ms(rest) + attended_ms
    return alone_ms * min(1.0, profile.mixed_factor or 1.0)
