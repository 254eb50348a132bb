"""Tests how messages are cut out of what arrives."""

from __future__ import annotations

import pytest

from services.vllm.messages import JsonMessage, Lines, encode

MESSAGES: list[JsonMessage] = [{"kind": "beat"}, {"kind": "broken", "error": "a\nb \u00e9 \ud83d"}, {"ids": [1, 2]}]


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 1000])
def test_messages_are_those_that_were_sent_however_they_arrive(num_bytes: int) -> None:
    data = b"".join(encode(message) for message in MESSAGES)
    lines, found = Lines(), []
    for at in range(0, len(data), num_bytes):
        found += lines.feed(data[at : at + num_bytes])
    assert found == MESSAGES
