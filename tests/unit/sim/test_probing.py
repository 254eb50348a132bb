"""Tests what `baton calibrate --measure` makes of answers that are no measurements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.v1 import inference_pb2
from services.core.errors import BatonError
from services.sim import probing
from services.sim.fitting import StepTimings
from services.sim.probing import Probe
from tests.support.patience import HANG_S


class Answers:
    """Answers each request with so many tokens; `None` for tokens without end."""

    def __init__(self, num_tokens: int | None) -> None:
        self._num_tokens = num_tokens

    async def generate_stream(self, request: Any) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        number = 0
        while self._num_tokens is None or number < self._num_tokens:
            number += 1
            response = inference_pb2.GenerateStreamResponse()
            response.chunk.token_ids.append(5)
            yield response


@pytest.mark.parametrize(("num_tokens", "seen"), [(0, 0), (1, 1), (None, 9)])
async def test_an_answer_of_another_length_is_refused(num_tokens: int | None, seen: int) -> None:
    probe = Probe(Answers(num_tokens), "m", 2048, 1000, (1, 1))  # type: ignore[arg-type]
    with pytest.raises(BatonError, match=f"an answer had {seen} tokens, of 8 that were asked for"):
        await probe.measure(StepTimings({}, {}), handed_over=False)


class Measured(Answers):
    """Answers as it is asked, until `most` requests have come; what comes then waits for ever."""

    def __init__(self, most: int) -> None:
        super().__init__(None)
        self._left = most
        self.is_waiting = asyncio.Event()

    async def __aenter__(self) -> Measured:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate_stream(self, request: Any) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        self._left -= 1
        if self._left < 0:
            self.is_waiting.set()
            await asyncio.Event().wait()
        response = inference_pb2.GenerateStreamResponse()
        for _ in range(request.stopping.max_tokens):
            await asyncio.sleep(0)  # others' turn
            response.chunk.token_ids[:] = [5]
            yield response


async def test_what_was_measured_is_kept_when_it_is_ended() -> None:
    """Ended in the middle of the streams: the prompts before them are known, and the streams that were over."""
    client = Measured(2 + 8 + 1)
    told: list[str] = []
    measuring = asyncio.create_task(
        probing.probe(
            *(lambda: client, "m", 2048, 1000, (1, 1)),
            handed_over=True,
            beside=True,
            within_s=HANG_S,
            tell=lambda doing, elapsed_s: told.append(doing),
        )
    )
    async with asyncio.timeout(HANG_S):
        await client.is_waiting.wait()
        measuring.cancel()
        timings = await measuring
    assert len(timings.prefill_ms) == 8
    assert [streams for streams, _ in timings.decode_ms] == [1]
    assert told[0] == "the first requests"
