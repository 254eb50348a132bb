"""Stands for tracer and metrics: takes everything, keeps nothing."""

from __future__ import annotations

from typing import Any

from services.rpc.telemetry import OpenSpan, Tracer


class NullSpan(OpenSpan):
    def __init__(self) -> None:
        self.traceparent = ""

    @property
    def is_recorded(self) -> bool:
        return False

    def set(self, attributes: Any) -> None:
        pass

    def event(self, name: str, at_s: float, attributes: Any = None) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        pass

    def end(self, end_s: float) -> None:
        pass


class NullTracer(Tracer):
    def __init__(self) -> None:
        self._span = NullSpan()

    def start(self, name: str, **_: Any) -> OpenSpan:
        return self._span

    def span(self, name: str, **_: Any) -> str:
        return ""


class NullMetrics:
    """`RouterMetrics`, with what it has of requests, and their records."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        pass
