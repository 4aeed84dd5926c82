"""How the SDK opens channels: one set of options for the sync and the asyncio client."""

import grpc
import grpc.aio

DEFAULT_ADDRESS = "127.0.0.1:50051"

# The public API keeps every message below gRPC's own default; stating it makes the bound visible.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

# A silent peer is noticed after keepalive time + timeout. Servers of this project allow a ping every 10 s;
# without max_pings_without_data = 0 a long prefill would stop the pings after two.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own back-off grows to two minutes, in which every call fails at once; streams come back sooner than
    # that.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def open_channel(address: str) -> grpc.Channel:
    """An insecure channel for blocking calls. It connects with the first call."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_aio_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel for the running event loop. It connects with the first call."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
