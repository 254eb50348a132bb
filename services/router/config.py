"""Defines a router's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.core.cluster_token import FILE_HELP
from services.core.config import (
    A_DURATION,
    A_DURATION_OR_ZERO,
    A_LOG_INTERVAL,
    DAY_S,
    DEFAULT_CONTROL_PORT,
    LOG_INTERVAL_HELP,
    duration,
    duration_or_zero,
    log_interval,
    option,
    positive,
)
from services.core.config import port as is_port
from services.router.policy import DEFAULT_SPLIT, Split
from services.router.policy.long_prompts import ISOLATIONS
from services.router.policy.outliers import OutlierConfig, is_slow_factor
from services.router.policy.presets import DEFAULT, PRESETS

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?|\*", re.ASCII)


def is_origin(text: str) -> bool:
    """Returns whether `text` is an origin as browsers send it: scheme, host and port, no path; or `*` for any."""
    return _ORIGIN.fullmatch(text) is not None


def objective_ms(value: float) -> bool:
    return 0 < value <= DAY_S * 1000


@dataclass(frozen=True)
class RouterConfig:
    model: str = option("smollm2-135m-instruct", "model: default model's name, local directory, GGUF file or hub id")
    served_model_name: str = option("", "model id clients use (default: derived from --model)")
    # Where the router listens.
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(50051, "gRPC port; 0 picks a free one", check=is_port, must="must be in [0, 65535]")
    http_port: int = option(
        -1, "port of the OpenAI-style HTTP API; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535
    )
    http_allowed_host: tuple[str, ...] = option(
        (),
        "name HTTP clients may ask for, beside those of loopback; repeatable (default: none on loopback, else any)",
    )
    http_cors_origin: tuple[str, ...] = option(
        (),
        "origin whose pages may use HTTP from a browser, such as https://app.example, or * for any; repeatable",
        check=is_origin,
        must="must be an origin, such as https://app.example, or *",
    )
    metrics_port: int = option(-1, "Prometheus port; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535)
    control_host: str = option("127.0.0.1", "address to bind for workers and operators")
    control_port: int = option(
        DEFAULT_CONTROL_PORT,
        "gRPC port for workers and for baton status, drain, explain, calibrate and plan --live; 0 picks a free one",
        check=is_port,
        must="must be in [0, 65535]",
    )
    cluster_token_file: str = option("", FILE_HELP)
    max_message_bytes: int = option(16 << 20, "largest request", check=positive, must="must be positive")
    max_text_bytes: int = option(
        2 << 20,
        "largest prompt text, bytes in UTF-8: what is longer is refused before it is tokenised",
        check=positive,
        must="must be positive",
    )
    max_pending_bytes: int = option(
        1 << 30,
        "bytes of all requests that are read, wait or run at once, over gRPC and HTTP together",
        check=positive,
        must="must be positive",
    )
    max_concurrent_rpcs: int = option(
        4096,
        "gRPC calls at once; when full, one that waits for its client is ended, else the new one refused",
        check=positive,
        must="must be positive",
    )
    policy: tuple[str, ...] = option(
        (),
        f"how requests are placed, of all models, or as MODEL=NAME of one: {', '.join(PRESETS)}; repeatable "
        f"(default: {DEFAULT})",
    )
    policy_file: str = option("", "TOML file with the policies and weights of models; --policy comes before it")
    policy_weight: tuple[str, ...] = option(
        (),
        "changes or adds a term of placement, PHASE.TERM=W: prefill.prefix_cached=8 sends prompts where their "
        "beginnings are cached; of all models, whatever their policies are; repeatable",
    )
    split: str = option(
        DEFAULT_SPLIT.value,
        "which prompts run apart from their decodes: auto (where it pays, by measured costs), always or never (where a "
        "decode worker can run the whole)",
        choices=tuple(split.value for split in Split),
    )
    isolate_long_prompts: str = option(
        "off",
        "auto keeps prompts of more than twice the mean length off some of the prefill workers while they are most of "
        "the work, so that short ones need not wait behind them",
        choices=ISOLATIONS,
    )
    tokenizer_threads: int = option(
        0, "threads that tokenise long texts; 0 takes half of the cores", check=lambda v: v >= 0, must="must be >= 0"
    )
    max_models: int = option(
        8,
        "models served at once: the router's own, and those that workers bring",
        check=lambda v: 1 <= v <= 256,
        must="must be in [1, 256]",
    )
    max_workers: int = option(
        1024,
        "workers of one model that may be registered at once",
        check=lambda v: 1 <= v <= 65536,
        must="must be in [1, 65536]",
    )
    # Admission.
    max_queue: int = option(
        1024, "requests of one model that may wait for a worker", check=positive, must="must be positive"
    )
    queue_timeout_s: float = option(120.0, "longest wait for a busy worker, seconds", check=duration, must=A_DURATION)
    no_worker_timeout_s: float = option(
        30.0, "longest wait while no worker is ready, seconds", check=duration, must=A_DURATION
    )
    aging_s: float = option(
        10.0,
        "a request that has waited this long is served within a bound, whatever its priority, seconds",
        check=duration,
        must=A_DURATION,
    )
    # Health.
    canaries: bool = option(True, "check workers, and transfers between them, with tiny requests of its own")
    canary_period_s: float = option(
        30.0,
        "how often a healthy worker is asked again and its answer compared, seconds",
        check=duration,
        must=A_DURATION,
    )
    step_timeout_s: float = option(
        30.0,
        "a worker whose device step runs longer is stuck: its requests go elsewhere, seconds",
        check=duration,
        must=A_DURATION,
    )
    slow_factor: float = option(
        OutlierConfig.slow_factor,
        "a worker whose steps take this many times the median of its peers' is ejected for a while; 0: never",
        check=is_slow_factor,
        must="must be 0, or above 1 and at most 1000",
    )
    # Sessions.
    heartbeat_s: float = option(0.5, "interval of heartbeats to workers, seconds", check=duration, must=A_DURATION)
    silence_s: float = option(2.0, "a worker silent this long is lost, seconds", check=duration, must=A_DURATION)
    register_s: float = option(1.0, "how often workers register again, seconds", check=duration, must=A_DURATION)
    drain_s: float = option(
        30.0, "time requests get to finish after SIGTERM, seconds", check=duration_or_zero, must=A_DURATION_OR_ZERO
    )
    # Observability.
    slo_ttft_ms: float = option(
        500.0,
        "objective for the time to the first token, ms",
        check=objective_ms,
        must="must be positive, and at most a day",
    )
    slo_e2e_ms: float = option(
        5000.0,
        "objective for the time to the last token, ms",
        check=objective_ms,
        must="must be positive, and at most a day",
    )
    log_prompts: bool = option(False, "write prompts to the log, which otherwise has no text of clients")
    trace_file: str = option("", "append spans to this file as OTLP JSON lines")
    log_interval_s: float = option(10.0, LOG_INTERVAL_HELP, check=log_interval, must=A_LOG_INTERVAL)
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = option("console", "log format", choices=("console", "json"))
