"""Tests what `baton calibrate --measure` makes of answers that are no measurements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.v1 import inference_pb2
from services.core.errors import BatonError
from services.sim.probing import Probe


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
    probe = Probe(Answers(num_tokens), "m", 2048, 1000, (1, 1), 1)  # type: ignore[arg-type]
    with pytest.raises(BatonError, match=f"an answer had {seen} tokens, of 8 that were asked for"):
        await probe.timings(handed_over=False, beside=False, tell=lambda line: None)
