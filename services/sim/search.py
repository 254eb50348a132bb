"""Searches the cheapest cluster that meets an objective, by simulating clusters in the order of their cost.

Few are simulated. Those that could not do the work in the time that bounds allow are left out, however well it was
spread (`needs`). Where more workers make nothing worse, so are those with fewer prefill workers than meet the bounds of
TTFT beside plenty of decode workers, and those with fewer decode workers than meet the bounds of TPOT and ITL beside so
few prefill workers. A simulation ends as soon as enough requests are late for a bound to be broken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import Split
from services.sim.cluster import SimPlan, simulate
from services.sim.goal import Goal, Hopeless, Watch
from services.sim.needs import needs, out_of_reach, work_s
from services.sim.profile import WorkerProfile
from services.sim.report import summary
from services.sim.trace import TracedRequest

_OF_PREFILL, _OF_DECODE = ("ttft", "queue"), ("tpot", "itl")
_MOST_OF_ALL_KINDS = 24
"""The most clusters of prefill, decode and mixed workers together that are tried; the cheapest are."""


@dataclass(frozen=True)
class Candidate:
    """Keeps a cluster that was simulated, and how well it kept the bounds."""

    plan: SimPlan
    figures: Mapping[str, Any] | None
    """None if a bound was broken by far before the end."""
    margin: float
    """Negative if it does not meet the goal."""
    attainment: float
    """The share of requests within all bounds of single requests (`Goal.objective`); of a hopeless one, the most that
    it could be."""
    broken: str = ""
    """The bound that is broken by far, of a hopeless one."""

    @property
    def meets_it(self) -> bool:
        return self.margin >= 0

    @property
    def name(self) -> str:
        counts = (("prefill", self.plan.prefill), ("decode", self.plan.decode), ("mixed", self.plan.mixed))
        return ", ".join(f"{count} {role}" for role, count in counts if count)


@dataclass(frozen=True)
class Found:
    """Keeps what a search has found; None for what there is not."""

    best: Candidate | None
    runner_up: Candidate | None
    """The next cheapest of another shape that meets the goal too."""
    unsplit: Candidate | None
    """Mixed workers alone, as many as cost no more than the best, whether they meet the goal or not."""
    split: Candidate | None
    """If the best is not split: the best of the clusters at its cost that are, whether it meets the goal or not."""
    nearest: Candidate | None
    """The one of those simulated with the largest margin, if none meets the goal."""
    out_of_reach: Mapping[str, float]
    """Bounds that no number of workers meets, with what a request takes alone on an idle worker, in milliseconds."""
    fewest: SimPlan
    """The fewest prefill, decode and mixed workers that could do the work at all, in a split and a mixed cluster."""
    tried: tuple[Candidate, ...]
    """All that were compared by all bounds, in that order."""
    sensitivity: Mapping[str, Candidate]
    """The best with another workload."""
    prompt_share: float
    """Which share of the work prompts are."""
    num_simulated: int
    """All of `tried`, and those that were simulated to find the fewest workers of a phase."""
    num_untried: int
    """Clusters of all three kinds that were not tried, although they cost no more than what was found (or than any, if
    that is not enough) and might meet the goal: there were too many."""


def search(
    trace: Sequence[TracedRequest],
    profile: WorkerProfile,
    decode_profile: WorkerProfile | None,
    goal: Goal,
    most_workers: int,
    progress: Callable[[str], None] = lambda line: None,
    router: CoordinatorConfig | None = None,
) -> Found:
    """Simulates clusters of at most `most_workers` workers, the cheapest first, until one meets the goal and another
    too. `router` is theirs; None for the default."""
    plan = SimPlan(profile=profile, decode_profile=decode_profile)
    if router is not None:
        plan = dataclasses.replace(plan, router=router)
    return _Search(trace, plan, goal, most_workers, progress).found()


class _Search:
    def __init__(
        self,
        trace: Sequence[TracedRequest],
        plan: SimPlan,
        goal: Goal,
        most_workers: int,
        progress: Callable[[str], None],
    ) -> None:
        """`plan` has the profiles and the router; its numbers of workers do not matter."""
        self._trace = trace
        self._goal = goal
        self._most = most_workers
        self._progress = progress
        self._needs = needs(trace, plan, goal)
        self._fewest = self._needs.fewest(plan)
        self._tried: dict[tuple[int, int, int], Candidate] = {}
        self._num_simulated = 0

    def found(self) -> Found:
        good: list[Candidate] = []
        num_of_all_kinds = num_untried = 0
        for plan in self._by_cost():
            if plan.mixed and plan.decode:
                num_of_all_kinds += 1
                if num_of_all_kinds > _MOST_OF_ALL_KINDS:
                    num_untried += 1
                    continue
            candidate = self._run(plan)
            if candidate.meets_it:
                good.append(candidate)
                if len(good) == 2:
                    break
        best, runner_up = (*good, None, None)[:2]
        tried = list(self._tried.values())
        unsplit, split = self._alternatives(best)
        sensitivity = self._sensitivity(best.plan) if best is not None else {}
        return Found(
            best,
            runner_up,
            unsplit,
            split,
            None if good else max(tried, key=lambda each: (each.margin, each.attainment), default=None),
            {} if good else out_of_reach(self._trace, self._fewest, self._goal),
            self._fewest,
            tuple(self._tried.values()),
            sensitivity,
            self._work_share(),
            self._num_simulated,
            num_untried,
        )

    def _run(self, plan: SimPlan, goal: Goal | None = None) -> Candidate:
        """Returns the cluster's figures; those of one that was simulated before are remembered, but not for another
        `goal`."""
        key = (plan.prefill, plan.decode, plan.mixed)
        if goal is None and key in self._tried:
            return self._tried[key]
        self._num_simulated += 1
        candidate = self._simulated(plan, self._trace, goal or self._goal)
        verdict = "meets it" if candidate.meets_it else "does not"
        margin = "a bound is broken by far" if candidate.margin < -1 else f"{candidate.margin:+.0%}"
        what = f" ({', '.join(goal.bounds_ms)} only, to find the fewest)" if goal is not None else ""
        self._progress(f"{candidate.name}: {verdict}{what} ({margin})")
        if goal is None:
            self._tried[key] = candidate
        return candidate

    def _simulated(self, plan: SimPlan, trace: Sequence[TracedRequest], goal: Goal) -> Candidate:
        try:
            outcome = simulate(plan, trace, on_end=Watch(goal, len(trace)).look)
        except Hopeless as hopeless:
            return Candidate(plan, None, -math.inf, hopeless.attainment, hopeless.bound)
        figures = summary(plan, outcome, goal.objective)
        return Candidate(plan, figures, goal.margin(figures), figures["attainment"])

    def _by_cost(self) -> Iterator[SimPlan]:
        """Yields the clusters that could meet the goal, the cheapest first. Of those that cost the same, mixed workers
        alone come first, then split ones, the most even first, then those of all kinds, the fewest mixed first.
        """
        fewest, most = self._fewest, self._most
        plans = [
            SimPlan(0, 0, mixed, profile=fewest.profile, router=fewest.router)
            for mixed in range(fewest.mixed, most + 1)
        ]
        split = [
            plan
            for mixed in range(most - 1)
            for some in range(1, most - mixed)
            for others in range(1, most - mixed - some + 1)
            if self._needs.allow(plan := dataclasses.replace(fewest, prefill=some, decode=others, mixed=mixed))
        ]
        if not self._more_is_no_worse:
            plans += split
        elif split:
            prefill = self._least("prefill", self._most)
            # More prefill workers hand prompts over in thicker bursts, so decode workers do best beside the fewest.
            decode = self._least("decode", prefill)
            # How many decode workers a mixed one stands for is not known if it is the faster one.
            may_be_faster = not _decodes_no_faster(fewest.profile, fewest.decode_profile or fewest.profile)
            plans += [
                plan
                for plan in split
                if plan.prefill + plan.mixed >= prefill
                and (plan.decode + plan.mixed >= decode or (plan.mixed and may_be_faster))
            ]
        yield from sorted(plans, key=_order)

    @property
    def _more_is_no_worse(self) -> bool:
        """Returns whether a phase's workers do their part no worse if there are more of them. They may on one host,
        whose cores they share, where what a prefix cache has is on one of many workers, and where small batches take
        longer than large ones; and where decode workers compute prompts, one phase's bounds say nothing of its own
        workers."""
        profiles = [each for each in (self._fewest.profile, self._fewest.decode_profile) if each is not None]
        shares_prefixes = any(request.block_ids for request in self._trace)
        return (
            all(each.steps_grow and not each.shares_host for each in profiles)
            and not shares_prefixes
            and self._fewest.router.split is Split.ALWAYS
        )

    def _least(self, role: str, others: int) -> int:
        """Returns the fewest workers of a role with which the bounds of its phase are kept beside `others` of the other
        role, by halving; what the work needs at least if the goal has no such bounds."""
        fewest = self._fewest
        low, high = (fewest.prefill if role == "prefill" else fewest.decode), self._most
        part = self._goal.of(_OF_PREFILL if role == "prefill" else _OF_DECODE)
        if not part.bounds_ms or low >= high:
            return low
        while low < high:
            middle = (low + high) // 2
            prefill, decode = (middle, others) if role == "prefill" else (others, middle)
            if self._run(dataclasses.replace(fewest, prefill=prefill, decode=decode, mixed=0), part).meets_it:
                high = middle
            else:
                low = middle + 1
        return low

    def _alternatives(self, best: Candidate | None) -> tuple[Candidate | None, Candidate | None]:
        """Returns mixed workers for the cost of a split cluster, or a split cluster for that of mixed workers."""
        if best is None:
            return None, None
        cost, profile = best.plan.cost_per_hour, self._fewest.profile
        if best.plan.decode:
            count = int(cost / profile.cost_per_hour + 1e-9) if profile.cost_per_hour else self._most
            if not 1 <= count <= self._most:
                return None, None
            return self._run(SimPlan(0, 0, count, profile=profile, router=self._fewest.router)), None
        plans = [
            dataclasses.replace(self._fewest, prefill=prefill, decode=decode, mixed=0)
            for prefill in range(1, self._most)
            for decode in range(1, self._most - prefill + 1)
        ]
        affordable = [plan for plan in plans if plan.cost_per_hour <= cost + 1e-9]
        # The dearest of them, nearest to the proportion of the work; its neighbours are not tried.
        wanted = self._work_share()
        dearest = max((plan.cost_per_hour for plan in affordable), default=0.0)
        of_cost = [plan for plan in affordable if plan.cost_per_hour >= dearest - 1e-9]
        plan = min(of_cost, key=lambda plan: abs(plan.prefill / (plan.prefill + plan.decode) - wanted), default=None)
        return None, None if plan is None else self._run(plan)

    def _work_share(self) -> float:
        """Returns which share of the work prompts are."""
        profile = self._fewest.profile
        prefill, decode = work_s(self._trace, profile, self._fewest.decode_profile or profile)
        return prefill / (prefill + decode) if prefill + decode else 0.5

    def _sensitivity(self, plan: SimPlan) -> dict[str, Candidate]:
        longest = min(plan.profile.max_model_len, plan.profile.num_blocks * plan.profile.block_size)
        faster = [dataclasses.replace(each, at_s=each.at_s / 1.2) for each in self._trace]
        longer = [
            dataclasses.replace(
                each,
                prompt_tokens=min(2 * each.prompt_tokens, max(each.prompt_tokens, longest - each.output_tokens)),
                block_tokens=2 * each.block_tokens,
            )
            for each in self._trace
        ]
        found = {}
        for name, trace in (("rate +20 %", faster), ("prompts twice as long", longer)):
            found[name] = self._simulated(plan, trace, self._goal)
            self._progress(f"{name}: {'meets it' if found[name].meets_it else 'does not'}")
        return found


def _decodes_no_faster(profile: WorkerProfile, other: WorkerProfile) -> bool:
    """Returns whether a worker of `profile` computes no more output than one of `other`, whatever the batch."""
    points = {int(size) for each in (profile, other) for size, _ in each.decode_points}
    sizes = {1, 2, *points, *(size + 1 for size in points), profile.max_num_seqs}
    tokens = [each.num_blocks * each.block_size for each in (profile, other)]
    return (
        all(profile.decode_ms(size) >= other.decode_ms(size) for size in sizes if 1 <= size <= profile.max_num_seqs)
        and profile.ms_per_context_token >= other.ms_per_context_token
        and profile.max_num_seqs <= other.max_num_seqs
        and tokens[0] <= tokens[1]
    )


def _order(plan: SimPlan) -> tuple[float, int, int, int]:
    kind = 0 if not plan.decode else 1 if not plan.mixed else 2
    return round(plan.cost_per_hour, 9), kind, plan.mixed if kind == 2 else 0, abs(plan.prefill - plan.decode)
