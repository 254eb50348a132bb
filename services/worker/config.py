"""Defines a worker's configuration: the same flags for every role, and those of them that a store has too."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.addresses import is_dialable
from services.core.config import (
    A_DEVICE,
    A_DURATION,
    A_DURATION_OR_ZERO,
    A_LOG_INTERVAL,
    DTYPE_HELP,
    DTYPES,
    FEWEST_BLOCKS,
    KV_DTYPE_HELP,
    KV_DTYPES,
    LEAST_CAPACITY,
    LOG_INTERVAL_HELP,
    MOST_CAPACITY,
    QUANTIZATION,
    QUANTIZATION_HELP,
    duration,
    duration_or_zero,
    log_interval,
    option,
    positive,
)
from services.core.config import device as is_device
from services.core.config import port as is_port
from services.core.ids import WORKER_ID_FORM, is_worker_id
from services.rpc.membership import MembershipConfig
from services.worker.engine_choice import EngineChoice
from services.worker.tier_config import ALLOW_PLAIN_KV_HELP, TierConfig


@dataclass(frozen=True)
class ModelConfig:
    """Keeps what only those have that compute: the model and the engine."""

    model: str = option("smollm2-135m-instruct", "model: default model's name, local directory, GGUF file or hub id")
    served_model_name: str = option("", "model id clients use (default: derived from --model)")
    device: str = option("cpu", "cpu, cuda, or one GPU such as cuda:0", check=is_device, must=A_DEVICE)
    dtype: str = option("auto", DTYPE_HELP, choices=DTYPES)
    kv_dtype: str = option("auto", KV_DTYPE_HELP, choices=KV_DTYPES)
    quantization: str = option("auto", QUANTIZATION_HELP, choices=QUANTIZATION)
    dtype_reason: str = ""
    """Why `dtype` has its value, if "auto" was asked for. It is not a flag."""
    memory_utilization: float = option(
        0.0,
        "share of device memory for weights and pool; 0 takes the device's default",
        check=lambda v: 0 <= v <= 1,
        must="must be in [0, 1]",
    )
    kv_blocks: int = option(
        0,
        "blocks in the pool; 0 sizes it by --memory-utilization",
        check=lambda v: v == 0 or v >= FEWEST_BLOCKS,
        must=f"must be 0, or at least {FEWEST_BLOCKS}",
    )
    block_size: int = option(
        0,
        "tokens in a block, the same on all workers; 0 takes the engine's own: 16, and with vLLM what it chooses",
        check=lambda v: 0 <= v <= 1024,
        must="must be in [0, 1024]",
    )
    max_num_seqs: int = option(64, "most sequences in one step", check=positive, must="must be positive")
    max_model_len: int = option(0, "most tokens of prompt and output; 0 takes the model's", check=lambda v: v >= 0)
    max_num_batched_tokens: int = option(
        512, "most tokens in one step; longer prompts run in chunks", check=positive, must="must be positive"
    )
    decode_graphs: bool = option(True, "on a GPU, run steps of decodes as CUDA graphs where that is faster")
    threads: int = option(
        0,
        "compute threads; 0 takes one per core it may use",
        check=lambda v: 0 <= v <= 1024,
        must="must be in [0, 1024]",
    )
    capacity: float = option(
        1.0,
        "speed beside other workers: 4 takes four times the requests of 1 with the router's --policy weighted, and may "
        "take a quarter of the time of 1 before it counts as slow",
        check=lambda v: LEAST_CAPACITY <= v <= MOST_CAPACITY,
        must=f"must be in [{LEAST_CAPACITY:g}, {MOST_CAPACITY:.0f}]",
    )


@dataclass(frozen=True)
class PeerConfig(MembershipConfig):
    """Keeps what everyone has who hands KV over: where it listens and whom it joins, transfers, sessions, telemetry."""

    # Where the worker listens and which routers it joins.
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(0, "gRPC port; 0 picks a free one", check=is_port, must="must be in [0, 65535]")
    metrics_port: int = option(-1, "Prometheus port; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535)
    router: tuple[str, ...] = option(
        (),
        "control port of a router to join, host:port; repeatable; a name with several addresses joins all",
        check=is_dialable,
        must="is not HOST:PORT of a router's control port",
    )
    advertise: str = option(
        "",
        "host:port routers and other workers dial (default: what was bound; for a wildcard, this host's address on the "
        "way to a router)",
        check=lambda v: not v or is_dialable(v),
        must="is not HOST:PORT that others can dial",
    )
    worker_id: str = option(
        "",
        "stable name in the cluster (default: role and port, with the host name between unless bound to loopback)",
        check=lambda v: not v or is_worker_id(v),
        must=f"is no worker's name: {WORKER_ID_FORM}",
    )
    # Transfer.
    transport: str = option(
        "auto",
        "how KV is pulled from other workers; auto: by what a probe finds fastest of shared memory, sockets and, with "
        "RDMA or a GPU, NIXL; where none works over gRPC; with another value what does not work fails",
        choices=("auto", "shm", "nixl", "tcp", "grpc"),
    )
    allow_plain_kv: bool = option(False, ALLOW_PLAIN_KV_HELP)
    kv_port: int = option(
        0,
        "port of the socket that other workers read KV from; 0 picks a free one",
        check=is_port,
        must="must be in [0, 65535]",
    )
    shm_dir: str = option("", "folder for the pool's Unix socket, shared between containers (default: abstract socket)")
    staging_mb: int = option(
        256,
        "host memory through which a pool on a GPU hands over by shared memory, MiB; a pool on a CPU needs none",
        check=positive,
        must="must be positive",
    )
    checksums: bool = option(False, "verify every imported block with xxh3")
    lease_ttl_s: float = option(
        10.0, "life of a sealed lease that no one fetches or holds, seconds", check=duration, must=A_DURATION
    )
    stall_s: float = option(
        5.0, "longest wait for a destination to copy an announced block, seconds", check=duration, must=A_DURATION
    )
    # Sessions.
    heartbeat_s: float = option(0.5, "interval of heartbeats to routers, seconds", check=duration, must=A_DURATION)
    silence_s: float = option(
        5.0, "a router silent this long has lost its session, seconds", check=duration, must=A_DURATION
    )
    max_message_bytes: int = option(64 << 20, "largest gRPC message", check=positive)
    drain_s: float = option(
        30.0, "time sequences get to finish after SIGTERM, seconds", check=duration_or_zero, must=A_DURATION_OR_ZERO
    )
    # Observability.
    cost_per_hour: float = option(
        0.0, "what an hour of this worker costs, in your currency, for baton_cost_total", check=lambda v: 0 <= v <= 1e9
    )
    trace_file: str = option("", "append spans to this file as OTLP JSON lines")
    log_interval_s: float = option(10.0, LOG_INTERVAL_HELP, check=log_interval, must=A_LOG_INTERVAL)
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = option("console", "log format", choices=("console", "json"))

    def demand_safe(self) -> None:
        """Raises ConfigError if the cluster token would cross a network in the clear, unasked."""
        self.demand_private(("--host", self.host), *(("--router", each) for each in self.router))


@dataclass(frozen=True)
class WorkerConfig(PeerConfig, TierConfig, EngineChoice, ModelConfig):
    """Keeps the configuration of a worker that computes."""
