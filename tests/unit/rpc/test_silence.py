"""A peer's silence is judged at its limit, whatever the clock shows there."""

from __future__ import annotations

import random

import pytest

from services.rpc.silence import PeerWatch


class _Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.num_readings = 0

    def now(self) -> float:
        self.num_readings += 1
        assert self.num_readings < 10, "it asks again and again, and no time passes"
        return self.now_s


@pytest.mark.parametrize("writing", [False, True])
async def test_a_deadline_that_has_come_is_a_verdict_however_it_was_rounded(writing: bool) -> None:
    choose = random.Random(1)
    for _ in range(500):
        heard_s, silence_s = choose.uniform(10.0, 10_000.0), choose.choice((0.3, 2.0, 5.0))
        clock = _Clock(heard_s)
        watch = PeerWatch(clock, silence_s)
        with watch.writing():
            clock.now_s = heard_s + silence_s
            if writing:
                watch.heard()
            assert f"{silence_s:g} s" in await watch.verdict()
