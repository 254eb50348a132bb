"""Tables say which answer to a canary is right: who agrees with whom, and whose word counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.router.coordinator.events import Tokens, WorkerInfo
from services.router.coordinator.known_answers import KnownAnswers, Said, agree, margin_of, said
from services.router.policy import Fingerprint, Role

FLOAT32 = Fingerprint("kv", "float32 weights, float32 activations")
PROMPT = (1, 2, 3)
NAN = math.nan


def worker(name: str, incarnation: int = 1, fingerprint: Fingerprint = FLOAT32) -> WorkerInfo:
    return WorkerInfo(name, Role.DECODE, incarnation, fingerprint, 16, 8, 128, 4)


# Who agrees with whom: by the log-probabilities of tokens 7 and 8, and of whatever else is given; margin 0.5.
AGREE: dict[str, tuple[Said, Said, bool]] = {
    "the same": (Said(7, {7: -0.1, 8: -3.0}), Said(7, {7: -0.1, 8: -3.0}), True),
    "the same, rounded": (Said(7, {7: -0.1, 8: -3.0}), Said(7, {7: -0.2, 8: -2.9}), True),
    "the same token, less surely": (Said(7, {7: -0.1, 8: -3.0}), Said(7, {7: -0.9, 8: -1.0}), True),
    "another, as good as a tie": (Said(7, {7: -0.7, 8: -0.8}), Said(8, {7: -0.8, 8: -0.7}), True),
    "another, far behind": (Said(7, {7: -0.1, 8: -3.0}), Said(8, {7: -3.0, 8: -0.1}), False),
    "one that was not even likely": (Said(7, {7: -0.1, 8: -3.0}), Said(9, {9: -0.1, 5: -3.0}), False),
    "one that finds nothing likelier than anything": (
        Said(7, {7: -0.1, 8: -3.0}),
        Said(7, {7: -6.0, 8: -6.0, 9: -6.0}),
        True,
    ),
    "one that chose otherwise, since nothing is likelier": (
        Said(7, {7: -0.1, 8: -3.0}),
        Said(9, {9: -6.0, 7: -6.0}),
        False,
    ),
    "the same, the other way round": (Said(9, {9: -6.0, 7: -6.0}), Said(7, {7: -0.1, 8: -3.0}), False),
    "no numbers": (Said(7, {7: -0.1, 8: -3.0}), Said(7, {7: NAN, 8: NAN}), False),
    "the same, and nothing told": (Said(7), Said(7), True),
    "another, and nothing told": (Said(7), Said(8), False),
    "another, and nothing told by one": (Said(7, {7: -0.7, 8: -0.7}), Said(8), False),
}


@pytest.mark.parametrize("case", AGREE)
def test_agreement(case: str) -> None:
    reference, answer, expected = AGREE[case]
    assert agree(reference, answer, 0.5) is expected


@pytest.mark.parametrize(
    ("numerics", "least", "most"),
    [
        ("float32 weights, float32 activations", 0.01, 0.2),
        ("bfloat16 weights, bfloat16 activations", 0.5, 2.0),
        ("float16 weights, float16 activations", 0.2, 1.0),
        ("int4 (groups of 32) weights, float32 activations rounded to 8 bits", 0.2, 1.0),
        ("int8 (groups of 32) weights, bfloat16 activations rounded to 8 bits", 0.5, 2.0),
        ("", 0.01, 0.2),
    ],
)
def test_margins_suit_the_type(numerics: str, least: float, most: float) -> None:
    assert least <= margin_of(Fingerprint("kv", numerics)) <= most


# Who is right. "a1=7" is worker a in incarnation 1 saying 7; "!" that it is told to be wrong; "a-" that its process is
# gone, or cut off.
RIGHT = {
    "one alone is believed": "a1=7",
    "all agree": "a1=7 b1=7 c1=7",
    "of two the newcomer is the suspect": "a1=7 b1=8! b1=8!",
    "and is right by a third's word": "a1=7 b1=8! c1=8 b1=8 a1=7!",
    "one that changes is wrong, though alone": "a1=7 a1=8!",
    "and right again if it comes back": "a1=7 a1=8! a1=7",
    "of two that agreed it is the one that changed": "a1=7 b1=7 a1=8! b1=7",
    "two are not overruled by one": "a1=7 b1=7 c1=8!",
    "nor by two that come later": "a1=7 b1=7 c1=8! d1=8!",
    "but by three": "a1=7 b1=7 c1=8! d1=8! e1=8 a1=7!",
    "a restarted one has a new vote": "a1=8 b1=7! a2=7 b1=7",
    "one that changes has no second vote": "a1=7 b1=8! a1=8! b1=8!",
    "one that is gone has no vote against one that comes later": "a1=9 a- b1=8",
    "nor have two": "a1=9 b1=9 a- b- c1=8",
    "only the living are counted": "a1=7 b1=7 c1=8! a- b- d1=8 c1=8",
    "what was found wrong does not become right because the other goes": "a1=7 b1=9! a- b1=9!",
    "but because a third says so": "a1=7 b1=9! a- c1=9 b1=9",
    "one that was right is right again as another process": "a1=7 a- b1=9 a2=7 b1=9!",
    "and where it was only cut off": "a1=7 a- b1=9 a1=7 b1=9!",
    "cut off and changed, it has the vote that it had": "a1=7 a- b1=9 a1=9! b1=9!",
    "one that goes and is replaced by a damaged one takes nothing with it": "a1=7 b1=7 a- a2=9! b1=7",
}


@pytest.mark.parametrize("case", RIGHT)
def test_who_is_right(case: str) -> None:
    answers = KnownAnswers()
    for step in RIGHT[case].split():
        if step.endswith("-"):
            answers.gone(step[0])
            continue
        name, incarnation, token_id = step[0], int(step[1]), int(step[3])
        reason = answers.wrong(worker(name, incarnation), PROMPT, [Said(token_id)])
        assert (reason is not None) is step.endswith("!"), f"{step} of {RIGHT[case]}: {reason}"


def test_positions_after_a_tie_are_other_prompts() -> None:
    """7 and 8 are a tie; after 7 comes 1, after 8 comes 2, and neither is wrong."""
    answers, tie = KnownAnswers(), {7: -0.7, 8: -0.7}
    assert answers.wrong(worker("a"), PROMPT, [Said(7, tie), Said(1)]) is None
    assert answers.wrong(worker("b"), PROMPT, [Said(8, tie), Said(2)]) is None
    assert answers.wrong(worker("c"), PROMPT, [Said(7, tie), Said(2)]) is not None


def test_workers_that_compute_otherwise_are_not_compared() -> None:
    answers, other = KnownAnswers(), Fingerprint("kv", "int8 weights, float32 activations")
    assert answers.wrong(worker("a"), PROMPT, [Said(7)]) is None
    assert answers.wrong(worker("b", fingerprint=other), PROMPT, [Said(8)]) is None


def test_the_outvoted_are_named_and_the_gone_forgotten() -> None:
    answers = KnownAnswers()
    for name, token_id in (("a", 7), ("b", 8), ("c", 8)):
        answers.wrong(worker(name), PROMPT, [Said(token_id)])
    assert answers.outvoted(FLOAT32) == {"a"}
    answers.forget({"a"}.__contains__)
    assert answers.outvoted(FLOAT32) == set()
    assert answers.wrong(worker("b"), PROMPT, [Said(8)]) is not None, "a's word is all there is"


@dataclass
class Top:
    token_id: int
    logprob: float


@dataclass
class Logprobs:
    top: list[Top] = field(default_factory=list)


def test_what_an_event_says() -> None:
    given: tuple[Any, ...] = (Logprobs([Top(7, -0.1), Top(8, -3.0)]),)
    assert said(Tokens(1, 0, (7,), given)) == [Said(7, {7: -0.1, 8: -3.0})]
    assert said(Tokens(1, 0, (7, 9))) == [Said(7), Said(9)]


def test_a_damaged_worker_that_is_asked_first_is_outvoted() -> None:
    """Its weights are zeros: to it every token is as good as any other, so whatever others say is a tie by its own
    numbers. By theirs, what it says is not."""
    answers = KnownAnswers()
    assert answers.wrong(worker("zeros"), PROMPT, [Said(0, dict.fromkeys(range(20), -6.0))]) is None
    answers.wrong(worker("b"), PROMPT, [Said(77, {77: -0.1, 78: -3.0})])
    assert answers.wrong(worker("c"), PROMPT, [Said(77, {77: -0.1, 78: -3.0})]) is None
    assert answers.outvoted(FLOAT32) == {"zeros"}
    assert answers.wrong(worker("zeros"), PROMPT, [Said(0, dict.fromkeys(range(20), -6.0))]) is not None
