"""Defines the flags that processes of several kinds have. Each kind composes those that it has."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.config import A_DURATION_OR_ZERO, A_LOG_INTERVAL, duration_or_zero, log_interval, option

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class ModelChoice:
    """Keeps the flag that says what is served."""

    model: str = option(DEFAULT_MODEL, "default model's name, local directory, GGUF file or hub id")


@dataclass(frozen=True)
class ModelName(ModelChoice):
    """Keeps the flags that say what is served, and under which name."""

    served_model_name: str = option("", "model id clients use (default: derived from --model)")


@dataclass(frozen=True)
class ListenConfig:
    """Keeps the flags that say where every process listens."""

    host: str = option("127.0.0.1", "address to bind")
    metrics_port: int = option(-1, "Prometheus port; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535)


@dataclass(frozen=True)
class DrainConfig:
    """Keeps the flag that says how a process ends."""

    drain_s: float = option(
        30.0,
        "time that requests get to finish after SIGTERM, seconds",
        check=duration_or_zero,
        must=A_DURATION_OR_ZERO,
    )


@dataclass(frozen=True)
class TraceConfig:
    """Keeps the flag that says where spans are written."""

    trace_file: str = option("", "append spans to this file as OTLP JSON lines")


@dataclass(frozen=True)
class LogConfig(TraceConfig):
    """Keeps the flags that say what a process tells of itself."""

    log_interval_s: float = option(
        10.0,
        "seconds between lines about what this process does, while it does anything; 0 writes none",
        check=log_interval,
        must=A_LOG_INTERVAL,
    )
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = option("console", "log format", choices=("console", "json"))
