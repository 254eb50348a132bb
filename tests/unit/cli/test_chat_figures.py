"""Tests the line that `baton chat` prints after an answer."""

from __future__ import annotations

import sys

import pytest

from baton.v1 import inference_pb2, types_pb2
from services.cli.chat import dimmed, figures


def completion(output_tokens: int, prefill: str, decode: str, retries: int = 0, **timings) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        usage=inference_pb2.Usage(output_tokens=output_tokens),
        workers=inference_pb2.Workers(prefill=prefill, decode=decode, retries=retries),
        timings=types_pb2.PhaseTimings(**timings),
    )


def test_a_split_answer() -> None:
    split = completion(
        *(41, "prefill-0", "decode-0"),
        ttft_ms=210.0,
        total_ms=1210.0,
        transfer_bytes=3 << 20,
        transfer_exposed_ms=1.25,
        transport=types_pb2.TRANSPORT_GRPC,
    )
    # Forty tokens in the second after the first.
    expected = "41 tokens | 40.0 tokens/s | first token 210 ms | prefill-0 -> decode-0: 3.0 MiB by grpc, 1.2 ms exposed"
    assert figures(split) == expected


def test_an_unsplit_answer_and_one_that_was_placed_again() -> None:
    unsplit = completion(2, "decode-0", "decode-0", ttft_ms=100.0, total_ms=150.0)
    assert figures(unsplit) == "2 tokens | 20.0 tokens/s | first token 100 ms | decode-0, not split"
    again = completion(1, "prefill-0", "", retries=2, ttft_ms=100.0, total_ms=100.0)
    assert figures(again) == "1 token | first token 100 ms | prefill-0, not split | placed again 2 times"


def test_nothing_is_made_up() -> None:
    assert figures(completion(5, "a", "b")) == "5 tokens | a -> b: KV"


def test_names_have_bounds() -> None:
    assert len(figures(completion(5, "a" * 1000, "b" * 1000))) < 150


def test_the_line_is_dim_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert dimmed("x") == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dimmed("x") == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert dimmed("x") == "x"
