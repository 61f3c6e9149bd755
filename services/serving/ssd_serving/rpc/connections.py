"""Limits of connections, by gRPC's own settings: how many, for how long, and what they may send.

A connection costs a descriptor, and anyone who can reach a port can open one, without a token. One
that says nothing is closed soon, an idle one a little later. gRPC cannot limit how many connections
one host has.

Compressed requests are not allowed: a few kilobytes on the wire could be as many megabytes here, in
many calls at once.
"""

import resource

HANDSHAKE_SECONDS = 10
IDLE_SECONDS = 300  # without a call
AGE_SECONDS = 3600  # after which a connection takes no new calls; those that run go on
PING_SECONDS = 20  # for the answer to a ping
MOST = 4096
MOST_PROBES = 128
NO_COMPRESSION = 1  # the bit of the algorithm that leaves bytes as they are
MAX_CHECK_BYTES = 4096  # a health check holds the name of a service
OTHERS = 128  # descriptors that are no connections: pipes, logs, files that are read again


def connection_options(keepalive_seconds: float = 60.0) -> list[tuple[str, int]]:
    """What a port for calls is told."""
    return [
        *_common(IDLE_SECONDS, keepalive_seconds),
        ("grpc.max_connection_age_ms", 1000 * AGE_SECONDS),
        ("grpc.max_allowed_incoming_connections", most_connections()),
    ]


def probe_options() -> list[tuple[str, int]]:
    """What a port for health alone is told: probes connect, ask and leave."""
    return [
        *_common(60, 20.0),
        ("grpc.max_receive_message_length", MAX_CHECK_BYTES),
    ]


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(16, min(MOST, soft - OTHERS) * 3 // 4)


def most_probes() -> int:
    """Each takes three descriptors, as it is handed on (``calls/health_port.py``)."""
    return min(MOST_PROBES, most_connections() // 9)


def _common(idle_seconds: int, keepalive_seconds: float) -> list[tuple[str, int]]:
    return [
        ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
        ("grpc.max_connection_idle_ms", 1000 * idle_seconds),
        ("grpc.keepalive_time_ms", int(1000 * keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", 1000 * PING_SECONDS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
        ("grpc.compression_enabled_algorithms_bitset", NO_COMPRESSION),
    ]
