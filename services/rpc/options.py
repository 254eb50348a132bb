"""Sets the gRPC options of both ends, which must agree: a server disconnects a client that pings faster than it allows.

Owns: the numbers. Never: opens anything.
"""

from __future__ import annotations

from services.core.descriptors import share_of_descriptors

Options = list[tuple[str, int]]

MIB = 1 << 20
# A prompt of a million tokens fits in 5 MiB. The runtime refuses larger messages, which can only be mistakes.
MAX_REQUEST_BYTES = 16 * MIB
# KV blocks travel in responses where shared memory cannot be used.
MAX_RESPONSE_BYTES = 64 * MIB

# Keepalive only frees what connections to hosts that are gone hold. Baton's own processes judge each other sooner,
# and in awake time (core/awake.py): sessions by rpc/silence.py, fetches by kvtransfer/fetch_stream.py. The first is a
# server's, since nothing else judges a client that only reads; the second is that of Baton's own channels.
CLIENT_KEEPALIVE_TIME_MS = 2_000
KEEPALIVE_TIME_MS = 4_000
# gRPC counts the time in which this process was stopped, so a pause that is longer than this ends a connection on
# which a ping was under way, for keepalive or to measure bandwidth. It is more than twice the default limits on
# silence (2 s at routers, 5 s at workers). gRPC makes it the connection's TCP_USER_TIMEOUT too.
KEEPALIVE_TIMEOUT_MS = 12_000
MIN_PING_INTERVAL_MS = 2_000
MAX_RECONNECT_BACKOFF_MS = 2_000

# Bounds what idle peers may cost. A process may have two gRPC servers, and HTTP beside them: together they stay below
# its limit of file descriptors. A server that is full closes a new connection at once, and the peer tries again.
SHARE_OF_DESCRIPTORS = 0.25
MAX_CONNECTIONS = 4096
# For the preface and the first settings. The runtime's own limit is two minutes.
HANDSHAKE_TIMEOUT_MS = 10_000
# For a connection without a call under way. A client that comes back reconnects by itself.
MAX_CONNECTION_IDLE_MS = 20_000
# After this, a connection takes no new calls, and is closed when those under way have ended, however long they take: no
# generation and no session is cut. So whoever keeps connections busy has to open them again, as newcomers do.
MAX_CONNECTION_AGE_MS = 120_000
# On one connection. The runtime makes a client that wants more wait.
MAX_CONCURRENT_STREAMS = 2048
# The most calls without the token that may be open at once, where no flag says it.
MAX_CALLS = 1024
# The runtime cancels calls that the event loop has not taken for this long, and tells nobody why. The default of 30 s
# passes where thousands begin at once; each call is taken in its turn, and its client has a deadline if it wants one.
MAX_UNTAKEN_S = 86_400
# The fewest calls that may wait until the event loop takes them, 16 KB each: so however few may be open at once, of
# some thousands that begin together each is refused with a reason.
LEAST_UNTAKEN = 8192


def max_connections() -> int:
    """Returns how many connections a server of this process accepts."""
    return share_of_descriptors(SHARE_OF_DESCRIPTORS, MAX_CONNECTIONS)


def server_options(max_request_bytes: int = MAX_REQUEST_BYTES, max_calls: int = MAX_CALLS) -> Options:
    """`max_calls` is how many calls without the token may be open at once; more are refused with a reason."""
    most_untaken = max(LEAST_UNTAKEN, 2 * max_calls)
    return [
        # Without this, a second server on the port would silently share it.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
        # The runtime reads this key; it ignores the one with "recv" in its name, which the C constant has.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", MAX_CONNECTION_IDLE_MS),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # Calls that the event loop has not taken yet. From the first of these numbers on (1,000 by default) the runtime
        # cancels some of them, and from the second all, without a reason. So a call is refused here only if more
        # begin at once than the limits that give a reason let through.
        ("grpc.server.max_pending_requests", most_untaken),
        ("grpc.server.max_pending_requests_hard_limit", most_untaken),
        ("grpc.server_max_unrequested_time_in_server", MAX_UNTAKEN_S),
        *_keepalive(CLIENT_KEEPALIVE_TIME_MS),
    ]


def channel_options() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES),
        *_keepalive(KEEPALIVE_TIME_MS),
        # A restarted worker is reached again within seconds, instead of after the default two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, this is how long one attempt may take: a busy machine answers late, and a lost SYN is sent
        # again after a second.
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        # One connection per channel: on a shared one, bulk KV messages would delay a session's tokens.
        ("grpc.use_local_subchannel_pool", 1),
        # Cluster addresses are direct; an http_proxy variable is meant for other traffic.
        ("grpc.enable_http_proxy", 0),
    ]


def name_options(name: str) -> list[tuple[str, str]]:
    """Returns the options of a channel in TLS that asks for the `name` in the server's certificate; empty means the
    host's.

    The name is the calls' authority then, as the runtime has it: it demands that one of the certificate too.
    """
    return [("grpc.ssl_target_name_override", name)] if name else []


def _keepalive(time_ms: int) -> Options:
    return [
        ("grpc.keepalive_time_ms", time_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Without this, the runtime waits a whole minute for the unanswered ping, despite the option above.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
