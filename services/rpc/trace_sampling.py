"""Decides whether a request is traced: once, at its root, for every span below it in every process.

Owns: which span decides. Never: how; the standard variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG say that.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import sampling
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes


class DecidedOnce(sampling.Sampler):
    """Asks the standard sampler for root spans only; every other span follows its parent.

    A root is a span that serves an RPC, or one without a parent. Without this rule, `always_on` or `traceidratio` in a
    worker would record parts of requests that the router does not trace, and its canaries.
    """

    def __init__(self, standard: sampling.Sampler) -> None:
        """`standard` is the sampler that the OTEL_TRACES_SAMPLER variables configure."""
        self._standard = standard

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> sampling.SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        if kind is SpanKind.SERVER or not parent.is_valid:
            return self._standard.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if parent.trace_flags.sampled:
            return sampling.SamplingResult(sampling.Decision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return sampling.SamplingResult(sampling.Decision.DROP)

    def get_description(self) -> str:
        return f"DecidedOnce({self._standard.get_description()})"
