"""Holds what both clients tell gRPC: the methods, the options of a channel, the types of a request and of metadata."""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1.inference_pb2 import GenerateRequest

Metadata = Sequence[tuple[str, str | bytes]]
ChannelOptions = Sequence[tuple[str, int | str]]

GENERATE = "/baton.v1.InferenceService/Generate"
GENERATE_STREAM = "/baton.v1.InferenceService/GenerateStream"
LIST_MODELS = "/baton.v1.InferenceService/ListModels"

OPTIONS: ChannelOptions = (
    # A long answer with log-probabilities is more than gRPC takes by default.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    # A router that has gone without a word is noticed after the sum, while a call is under way. The timeout is longer
    # than a pause of the whole host that workers and routers survive.
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 12_000),
    ("grpc.http2.ping_timeout_ms", 12_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Between two attempts the channel, too, must have tried to connect again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def demand_request(request: object) -> None:
    """Raises TypeError for what is no request: gRPC would call it an internal error of the server's."""
    if not isinstance(request, GenerateRequest):
        raise TypeError(f"{type(request).__name__} is no baton.v1 GenerateRequest; a text is GenerateRequest(text=...)")
