"""Defines a worker's configuration: the same flags for every role, and those of them that a store has too."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.addresses import is_dialable
from services.core.config import (
    A_DEVICE,
    DTYPES,
    FEWEST_BLOCKS,
    KV_DTYPES,
    LEAST_CAPACITY,
    MOST_CAPACITY,
    QUANTIZATION,
    duration_option,
    option,
    port_option,
    positive_option,
)
from services.core.config import device as is_device
from services.core.ids import WORKER_ID_FORM, is_worker_id
from services.core.process_config import DrainConfig, ListenConfig, LogConfig, ModelName
from services.rpc.membership import MembershipConfig
from services.worker.engine_choice import EngineChoice
from services.worker.tier_config import TierConfig


@dataclass(frozen=True)
class ComputeConfig:
    """Keeps the flags that say on what workers compute, and in which types. `baton up` has the same."""

    device: str = option(
        "cpu",
        "cpu, cuda, or one GPU such as cuda:0; with cuda, baton up spreads its workers over all GPUs",
        check=is_device,
        must=A_DEVICE,
    )
    dtype: str = option(
        "auto",
        "type of weights, activations and KV cache, the same on all workers; auto: as the model was saved, or on a CPU "
        "float32 where the CPU has no instructions for bfloat16",
        choices=DTYPES,
    )
    kv_dtype: str = option(
        "auto",
        "type of the KV cache, the same on all workers; auto: that of --dtype; 16 bits beside float32 halve it; int8, "
        "only on a CPU, rounds it to about half of 16 bits",
        choices=KV_DTYPES,
    )
    quantization: str = option(
        "auto",
        "bits of weights on a CPU, the same on all workers; none: as saved, and quantised ones in the type of --dtype; "
        "int8 and int4 round them at load; gguf, gptq and awq: those of a GGUF file or of a checkpoint of that kind "
        "stay as they are there; auto: one of these where --dtype is auto too, else none",
        choices=QUANTIZATION,
    )
    threads: int = option(
        0,
        "compute threads of a worker; 0 takes one per core it may use",
        check=lambda v: 0 <= v <= 1024,
        must="must be in [0, 1024]",
    )
    kv_blocks: int = option(
        0,
        "blocks in the pool; 0: as many as memory allows",
        check=lambda v: v == 0 or v >= FEWEST_BLOCKS,
        must=f"must be 0, or at least {FEWEST_BLOCKS}",
    )


@dataclass(frozen=True)
class TransferConfig:
    """Keeps the flags that say how KV is moved. `baton up` has the same."""

    transport: str = option(
        "auto",
        "how KV is pulled from other workers; auto: by what a probe finds fastest of shared memory, sockets and, with "
        "RDMA or a GPU, NIXL; where none works over gRPC; with another value what does not work fails",
        choices=("auto", "shm", "nixl", "tcp", "grpc"),
    )
    allow_plain_kv: bool = option(
        False, "with TLS, let KV cross networks in the clear too: by NIXL, and to a --kv-backend without TLS"
    )


@dataclass(frozen=True)
class ModelConfig(ComputeConfig, ModelName):
    """Keeps what only those have that compute: the model and the engine."""

    dtype_reason: str = ""
    """Why `dtype` has its value, if "auto" was asked for. It is not a flag."""
    memory_utilization: float = option(
        0.0,
        "share of device memory for weights and pool; 0 takes the device's default",
        check=lambda v: 0 <= v <= 1,
        must="must be in [0, 1]",
    )
    block_size: int = option(
        0,
        "tokens in a block, the same on all workers; 0 takes the engine's own: 16, and with vLLM what it chooses",
        check=lambda v: 0 <= v <= 1024,
        must="must be in [0, 1024]",
    )
    max_num_seqs: int = positive_option(64, "most sequences in one step")
    max_model_len: int = option(0, "most tokens of prompt and output; 0 takes the model's", check=lambda v: v >= 0)
    max_num_batched_tokens: int = positive_option(512, "most tokens in one step; longer prompts run in chunks")
    decode_graphs: bool = option(True, "on a GPU, run steps of decodes as CUDA graphs where that is faster")
    capacity: float = option(
        1.0,
        "speed beside other workers: 4 takes four times the requests of 1 with the router's --policy weighted, and may "
        "take a quarter of the time of 1 before it counts as slow",
        check=lambda v: LEAST_CAPACITY <= v <= MOST_CAPACITY,
        must=f"must be in [{LEAST_CAPACITY:g}, {MOST_CAPACITY:.0f}]",
    )


@dataclass(frozen=True)
class PeerConfig(LogConfig, DrainConfig, TransferConfig, MembershipConfig, ListenConfig):
    """Keeps what everyone has who hands KV over: where it listens and whom it joins, transfers, sessions, telemetry."""

    # Where the worker listens and which routers it joins.
    port: int = port_option(0, "gRPC port; 0 picks a free one")
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
    kv_port: int = port_option(0, "port of the socket that other workers read KV from; 0 picks a free one")
    shm_dir: str = option("", "folder for the pool's Unix socket, shared between containers (default: abstract socket)")
    staging_mb: int = positive_option(
        256, "host memory through which a pool on a GPU hands over by shared memory, MiB; a pool on a CPU needs none"
    )
    checksums: str = option(
        "auto",
        "verify every imported block with xxh3; auto: where the pool is in host memory, as a block of another device "
        "would have to be copied from there for it",
        choices=("auto", "always", "never"),
    )
    # Sessions.
    silence_s: float = duration_option(5.0, "a router silent this long has lost its session, seconds")
    # Observability.
    cost_per_hour: float = option(
        0.0, "what an hour of this worker costs, in your currency, for baton_cost_total", check=lambda v: 0 <= v <= 1e9
    )
    # What is no flag, since nobody would turn it but a test.
    lease_ttl_s: float = 10.0
    """Life of a sealed lease that no one fetches or holds."""
    stall_s: float = 5.0
    """Longest wait for a destination to copy an announced block."""
    heartbeat_s: float = 0.5
    """Interval of heartbeats to routers."""
    max_message_bytes: int = 64 << 20
    """Bytes of the largest gRPC message."""

    def demand_safe(self) -> None:
        """Raises ConfigError if the cluster token would cross a network in the clear, unasked."""
        self.demand_private(("--host", self.host), *(("--router", each) for each in self.router))


@dataclass(frozen=True)
class WorkerConfig(PeerConfig, TierConfig, EngineChoice, ModelConfig):
    """Keeps the configuration of a worker that computes."""
