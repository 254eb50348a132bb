"""A router's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.config import option, port, positive


@dataclass(frozen=True)
class RouterConfig:
    model: str = option("smollm2-135m-instruct", "model: default model's name, local directory, GGUF file or hub id")
    served_model_name: str = option("", "model id clients use (default: derived from --model)")
    # Where it listens.
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(50051, "gRPC port; 0 picks a free one", check=port, must="must be in [0, 65535]")
    http_port: int = option(
        -1, "port of the OpenAI-style HTTP API; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535
    )
    metrics_port: int = option(-1, "Prometheus port; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535)
    max_message_bytes: int = option(16 << 20, "largest request", check=positive, must="must be positive")
    # Admission.
    max_queue: int = option(1024, "requests that may wait for a worker", check=positive, must="must be positive")
    queue_timeout_s: float = option(
        120.0, "longest wait for a busy worker, seconds", check=positive, must="must be positive"
    )
    no_worker_timeout_s: float = option(
        30.0, "longest wait while no worker is ready, seconds", check=positive, must="must be positive"
    )
    # Health.
    canaries: bool = option(True, "check workers, and transfers between them, with tiny requests of its own")
    step_timeout_s: float = option(
        30.0,
        "a worker whose device step runs longer is stuck: its requests go elsewhere, seconds",
        check=positive,
        must="must be positive",
    )
    # Sessions.
    heartbeat_s: float = option(0.5, "interval of heartbeats to workers, seconds", check=positive)
    silence_s: float = option(2.0, "a worker silent this long is lost, seconds", check=positive)
    register_s: float = option(1.0, "how often workers register again, seconds", check=positive)
    drain_s: float = option(30.0, "time requests get to finish after SIGTERM, seconds", check=lambda v: v >= 0)
    # Observability.
    slo_ttft_ms: float = option(
        500.0, "objective for the time to the first token, ms", check=positive, must="must be positive"
    )
    slo_e2e_ms: float = option(
        5000.0, "objective for the time to the last token, ms", check=positive, must="must be positive"
    )
    log_prompts: bool = option(False, "write prompts to the log, which otherwise has no text of clients")
    trace_file: str = option("", "append spans to this file as OTLP JSON lines")
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = option("console", "log format", choices=("console", "json"))
