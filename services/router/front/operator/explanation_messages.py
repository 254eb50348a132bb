"""Writes down why requests were placed as they were, as ControlService tells it.

Owns: the messages. Never: what is remembered, or what decided (`policy/explanation.py`).
"""

from __future__ import annotations

from baton.v1 import control_pb2
from services.router.catalogue import ServedModel
from services.router.policy import (
    LeftOutWorkers,
    PlacedPhase,
    PlacementChoice,
    PrefixOutcome,
    PrefixSource,
    SplitAfterAll,
    SplitCosts,
    Unsplit,
    VainAttempt,
    WhyComputed,
    WhyNot,
    WhySplit,
    WhyUnsplit,
)
from services.router.policy.explanation import Decider, ExplainedChoice, ExplainedRequest, Verdict, term_name

MOST_ANSWERED = 8
"""The most requests of one label that are answered with."""

_PHASES = {phase: f"PLACED_PHASE_{phase.name}" for phase in PlacedPhase}
_REASONS = {why: f"LEFT_OUT_REASON_{why.name}" for why in WhyNot}
_UNSPLIT = {why: f"UNSPLIT_REASON_{why.name}" for why in WhyUnsplit}
_SPLIT = {why: f"SPLIT_REASON_{why.name}" for why in WhySplit}
_COMPUTED = {why: f"PREFIX_COMPUTED_REASON_{why.name}" for why in WhyComputed}
_DECIDERS = {decider: f"DECIDER_{decider.name}" for decider in Decider}


def explained(
    models: list[ServedModel], label: str, now: float, request_id: str | None = None
) -> list[control_pb2.ExplainedRequest]:
    """Returns what the models remember of requests of that label, the newest first, at most `MOST_ANSWERED`; with the
    router's own `request_id`, of that one only."""
    found = [
        (model, each)
        for model in models
        for each in model.conductor.explanations.find(label)
        if request_id in (None, each.request_id)
    ]
    found.sort(key=lambda pair: -pair[1].arrived_s)
    return [_request(model, each, now) for model, each in found[:MOST_ANSWERED]]


def _request(model: ServedModel, request: ExplainedRequest, now: float) -> control_pb2.ExplainedRequest:
    vain = request.unplaced
    if request.is_live:
        waits = model.conductor.coordinator.wait_of(request.request_id)
        vain = waits[1] if waits is not None else None
    return control_pb2.ExplainedRequest(
        request_id=request.label,
        model=model.model_id,
        age_us=_us(now - request.arrived_s),
        live=request.is_live,
        failure=request.failure,
        choices=[_choice(each, now) for each in request.choices],
        num_forgotten=request.num_forgotten,
        waiting=_vain(vain, now) if vain is not None else None,
    )


def _choice(placed: ExplainedChoice, now: float) -> control_pb2.PlacementChoice:
    choice = placed.choice
    return control_pb2.PlacementChoice(
        phase=_PHASES[choice.phase],
        leg=placed.leg,
        attempt=placed.attempt,
        age_us=_us(now - choice.at_s),
        waited_us=_us(choice.waited_s),
        outcome=placed.outcome,
        terms=[control_pb2.PlacementTerm(name=term_name(term), weight=weight) for weight, term in choice.terms],
        candidates=[
            control_pb2.PlacementCandidate(worker_id=each.worker_id, score=each.score, values=each.values)
            for each in choice.scored
        ],
        num_candidates=choice.num_candidates,
        left_out=_left_out(choice.left_out),
        num_left_out=choice.left_out.number,
        verdict=_verdict(choice),
        before=_vain(choice.before, now) if choice.before is not None else None,
        unsplit=_unsplit(choice.unsplit) if choice.unsplit is not None else None,
        split=_split(choice.split) if choice.split is not None else None,
        prefix=_prefix(choice.prefix, choice.brought) if choice.prefix is not None else None,
    )


def _prefix(prefix: PrefixSource, brought: PrefixOutcome | None) -> control_pb2.PrefixFromElsewhere:
    return control_pb2.PrefixFromElsewhere(
        source=prefix.worker_id,
        num_tokens=prefix.num_tokens,
        bring_ms=prefix.bring_ms,
        compute_ms=prefix.compute_ms,
        why_computed=_COMPUTED[prefix.why_computed] if prefix.why_computed is not None else None,
        brought_tokens=brought.num_tokens if brought is not None else None,
        brought_ms=brought.ms if brought is not None else None,
    )


def _unsplit(unsplit: Unsplit) -> control_pb2.Unsplit:
    return control_pb2.Unsplit(
        reason=_UNSPLIT[unsplit.why], prefill=unsplit.prefill_id, costs=_split_costs(unsplit.costs)
    )


def _split(split: SplitAfterAll) -> control_pb2.SplitAfterAll:
    return control_pb2.SplitAfterAll(reason=_SPLIT[split.why], decode=split.decode_id, costs=_split_costs(split.costs))


def _split_costs(costs: SplitCosts | None) -> control_pb2.SplitCosts | None:
    if costs is None:
        return None
    return control_pb2.SplitCosts(
        queue_ms=costs.queue_ms,
        prefill_ms=costs.prefill_ms,
        handoff_ms=costs.handoff_ms,
        unsplit_queue_ms=costs.unsplit_queue_ms,
        unsplit_prefill_ms=costs.unsplit_prefill_ms,
        disturbance_ms=costs.disturbance_ms,
    )


def _verdict(choice: PlacementChoice) -> control_pb2.PlacementVerdict:
    verdict: Verdict = choice.verdict()
    return control_pb2.PlacementVerdict(
        decider=_DECIDERS[verdict.decider],
        term=verdict.term,
        term_difference=verdict.term_difference,
        score_difference=verdict.score_difference,
        queue_ms=verdict.queue_ms,
        step_ms=verdict.step_ms,
    )


def _vain(attempt: VainAttempt, now: float) -> control_pb2.VainAttempt:
    return control_pb2.VainAttempt(
        phase=_PHASES[attempt.phase],
        age_us=_us(now - attempt.at_s),
        left_out=_left_out(attempt.left_out),
        num_left_out=attempt.left_out.number,
    )


def _left_out(workers: LeftOutWorkers) -> list[control_pb2.LeftOutWorker]:
    return [control_pb2.LeftOutWorker(worker_id=each.worker_id, reason=_REASONS[each.why]) for each in workers.named]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
