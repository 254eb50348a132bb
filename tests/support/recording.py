"""Provides a tracer whose spans a test can read."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.rpc.telemetry import Tracer


def recording_tracer(spans: InMemorySpanExporter) -> Tracer:
    """Its spans are in `spans` as soon as they end."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracer(provider)
