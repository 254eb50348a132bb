"""gRPC options of both ends, side by side because they must agree: a client that pings faster than its server allows
is thrown out. Owns the numbers; opens nothing.
"""

from __future__ import annotations

Options = list[tuple[str, int]]

MIB = 1 << 20
# A prompt of a million tokens fits in 5 MiB; what is larger is a mistake and the runtime refuses it.
MAX_REQUEST_BYTES = 16 * MIB
# KV blocks travel in responses when shared memory is not at hand.
MAX_RESPONSE_BYTES = 64 * MIB

# Towards clients, which may be slow, and towards Baton's own processes: a fetch whose source has become unreachable
# fails, and is tried elsewhere, after their sum.
CLIENT_KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIME_MS = 4_000
KEEPALIVE_TIMEOUT_MS = 4_000
MIN_PING_INTERVAL_MS = 2_000
MAX_RECONNECT_BACKOFF_MS = 2_000


def server_options(max_request_bytes: int = MAX_REQUEST_BYTES) -> Options:
    return [
        # Without this a second server on the port would silently share it.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
        # The key that is read; the one with "recv" in its name, as the C constant has it, is ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        *_keepalive(CLIENT_KEEPALIVE_TIME_MS),
    ]


def channel_options() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
        *_keepalive(KEEPALIVE_TIME_MS),
        # A restarted worker is found again within seconds, not after the default two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt may take, in spite of its name: a busy machine answers late, a lost SYN is sent again
        # after a second.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        # A connection per channel: bulk KV messages must not queue ahead of a session's tokens on one they share.
        ("grpc.use_local_subchannel_pool", 1),
        # Cluster addresses are direct; an http_proxy variable is meant for other traffic.
        ("grpc.enable_http_proxy", 0),
    ]


def _keepalive(time_ms: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without this the unanswered ping is waited for a whole minute, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
