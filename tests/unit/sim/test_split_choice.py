"""Tests that splitting where it pays is never worse than 5 % beside the better of always and never, for TTFT and for
TPOT each. `python -m benchmarks.split_choice` compares them on a real trace."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.figure import Figure
from benchmarks.split_choice import CPU, Case, compared, p95s, piece
from services.router.policy import Split
from services.sim.trace import synthetic_trace

TRACE = synthetic_trace(1000, seed=3)
"""A request a second."""
CASES = (Case("cpu", 1, 1, 1.0, 0.25), Case("cpu", 2, 2, 3.0, 0.25), Case("cpu", 3, 1, 3.0, 0.25))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_no_worse_than_the_better_of_both(case: Case) -> None:
    figures = compared(case, CPU, [piece(TRACE, 300.0, case, 200.0 / case.rate)])
    ratios = [figure for figure in figures if isinstance(figure, Figure) and figure.unit == "x"]
    assert len(ratios) == 2
    for figure in ratios:
        assert max(figure.samples) <= 1.05, figure


def test_where_each_way_is_the_better_in_one_it_is_near_the_better_in_both() -> None:
    """Has one prefill worker, too few for prompts that come so fast; and never to split disturbs streams."""
    case = Case("cpu", 1, 3, 3.0, 0.25)
    trace = piece(TRACE, 0.0, case, 100.0)
    auto, always, never = (p95s(case, CPU, trace, split) for split in (Split.AUTO, Split.ALWAYS, Split.NEVER))
    assert never["ttft"] < 0.7 * always["ttft"]
    assert always["tpot"] < 0.9 * never["tpot"]
    assert auto["ttft"] < 1.2 * never["ttft"]
    assert auto["tpot"] < 1.1 * always["tpot"]


def test_over_a_slow_link_little_is_handed_over() -> None:
    """Hands prompts of 255 tokens over in more than a second each, until the first twenty have shown it."""
    slow = dataclasses.replace(CPU, transfer_bytes_per_s=5e6)
    case = Case("slow", 1, 1, 0.5, 0.25)
    trace = piece(TRACE, 0.0, case, 900.0)
    auto, always = (p95s(case, slow, trace, split) for split in (Split.AUTO, Split.ALWAYS))
    assert auto["tpot"] < 0.5 * always["tpot"]
