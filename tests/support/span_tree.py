"""Describes the tree of spans of a request that was split (docs/tracing.md): each name's parent."""

from services.rpc.names import Span

PARENTS = {
    Span.TOKENIZE: Span.REQUEST,
    Span.QUEUE: Span.REQUEST,
    Span.PLACE: Span.REQUEST,
    Span.PREFILL: Span.REQUEST,
    Span.DECODE: Span.REQUEST,
    Span.PREFILL_WAIT: Span.PREFILL,
    Span.PREFILL_COMPUTE: Span.PREFILL,
    Span.KV_TRANSFER: Span.DECODE,
    Span.DECODE_WAIT: Span.DECODE,
    Span.DECODE_RUN: Span.DECODE,
}
