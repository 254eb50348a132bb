"""Defines a router's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.core.addresses import bare_host, is_loopback
from services.core.config import (
    A_DURATION,
    A_DURATION_OR_ZERO,
    A_LOG_INTERVAL,
    DAY_S,
    DEFAULT_CONTROL_PORT,
    DEFAULT_PORT,
    LOG_INTERVAL_HELP,
    duration,
    duration_or_zero,
    log_interval,
    option,
    positive,
)
from services.core.config import port as is_port
from services.core.errors import ConfigError
from services.core.jaeger import A_WEB_ADDRESS, JAEGER_HELP, is_web_address
from services.router.policy import DEFAULT_SPLIT, SHARING, Split
from services.router.policy.long_prompts import ISOLATIONS
from services.router.policy.outliers import OutlierConfig, is_slow_factor
from services.router.policy.presets import DEFAULT, PRESETS
from services.router.tenant_config import TenantConfig
from services.router.text.output.families import REASONING_PARSERS, TOOL_PARSERS
from services.rpc.certificates import PUBLIC_FLAGS, Certificates
from services.rpc.membership import MembershipConfig

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?|\*", re.ASCII)

PUBLIC_CERT_HELP = (
    "PEM file with the certificate that clients are shown over gRPC and HTTP, and those that lead to its CA; read "
    "again when it changes (default: that of --tls-cert)"
)
PUBLIC_KEY_HELP = "PEM file with the private key of --public-tls-cert"
CLIENT_CA_HELP = (
    "PEM file with CAs: clients over gRPC and HTTP must show a certificate of one (default: none is asked for)"
)
CONSOLE_HELP = "serve the console, a page that shows the cluster and its requests, on the HTTP port"
CONSOLE_TOKEN_HELP = (
    "file with the token that the console asks for; made if it is not there (default: none is asked for on loopback, "
    "and elsewhere there is no console)"
)
REPLAY_ACROSS_ENGINES_HELP = (
    "let a stream whose engine (torch, vllm) has no worker left that could go on with it go on with another engine; "
    "else it waits for one, and fails"
)
TOOL_PARSER_HELP = (
    f"how calls of tools are read from outputs, of all models, or as MODEL=NAME of one: {', '.join(TOOL_PARSERS)}; "
    "repeatable (default: as each model's chat template says)"
)
REASONING_PARSER_HELP = (
    f"how what a model thinks is told from its answers, of all models, or as MODEL=NAME: "
    f"{', '.join(REASONING_PARSERS)}; repeatable (default: as each model's chat template says)"
)


def is_origin(text: str) -> bool:
    """Returns whether `text` is an origin as browsers send it: scheme, host and port, no path; or `*` for any."""
    return _ORIGIN.fullmatch(text) is not None


def objective_ms(value: float) -> bool:
    return 0 < value <= DAY_S * 1000


def demand_private_keys(host: str, is_allowed: bool) -> None:
    """Raises ConfigError if clients' keys would cross a network in the clear on their way to a router that binds the
    host."""
    if not is_allowed and not is_loopback(bare_host(host)):
        raise ConfigError(
            "--tenants: clients' keys would cross the network in the clear: give --public-tls-cert and "
            "--public-tls-key, or --allow-plain-token if the network is private, or something in front speaks TLS"
        )


@dataclass(frozen=True)
class RouterConfig(MembershipConfig, TenantConfig):
    model: str = option("smollm2-135m-instruct", "model: default model's name, local directory, GGUF file or hub id")
    served_model_name: str = option("", "model id clients use (default: derived from --model)")
    # Where the router listens.
    host: str = option("127.0.0.1", "address to bind")
    port: int = option(DEFAULT_PORT, "gRPC port; 0 picks a free one", check=is_port, must="must be in [0, 65535]")
    http_port: int = option(
        -1, "port of the OpenAI-style HTTP API; 0 picks a free one, -1 none", check=lambda v: -1 <= v <= 65535
    )
    http_allowed_host: tuple[str, ...] = option(
        (),
        "name HTTP clients may ask for, beside those of loopback; repeatable (default: none on loopback, else any)",
    )
    http_keepalive_s: float = option(
        5.0,
        "seconds without a byte after which a stream over HTTP gets a comment with its request's progress; 0: none",
        check=log_interval,
        must=A_LOG_INTERVAL,
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
        "gRPC port for workers, baton status, top, slo, explain, drain, calibrate and plan --live; 0 picks a free one",
        check=is_port,
        must="must be in [0, 65535]",
    )
    public_tls_cert: str = option("", PUBLIC_CERT_HELP)
    public_tls_key: str = option("", PUBLIC_KEY_HELP)
    tls_client_ca: str = option("", CLIENT_CA_HELP)
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
    share_prefixes: str = option(
        "auto",
        "auto: a worker brings the beginning of a prompt from another worker's pool, or from a store, where that costs "
        "less than to compute it, and stores keep what is computed; never: neither",
        choices=SHARING,
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
    tool_parser: tuple[str, ...] = option((), TOOL_PARSER_HELP)
    reasoning_parser: tuple[str, ...] = option((), REASONING_PARSER_HELP)
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
    replay_across_engines: bool = option(False, REPLAY_ACROSS_ENGINES_HELP)
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
    slo_tpot_ms: float = option(
        100.0,
        "objective for the mean time of a token after the first, ms, for baton slo, top and the console",
        check=objective_ms,
        must="must be positive, and at most a day",
    )
    slo_itl_ms: float = option(
        200.0,
        "objective for the longest time between two tokens of a request, ms, for baton slo, top and the console",
        check=objective_ms,
        must="must be positive, and at most a day",
    )
    slo_e2e_ms: float = option(
        5000.0,
        "objective for the time to the last token, ms",
        check=objective_ms,
        must="must be positive, and at most a day",
    )
    console: bool = option(True, CONSOLE_HELP)
    console_token_file: str = option("", CONSOLE_TOKEN_HELP)
    log_prompts: bool = option(
        False,
        "write prompts to the log, and show prompts and outputs in the console; else neither has text of clients",
    )
    trace_file: str = option("", "append spans to this file as OTLP JSON lines")
    jaeger_url: str = option("", JAEGER_HELP, check=lambda url: not url or is_web_address(url), must=A_WEB_ADDRESS)
    log_interval_s: float = option(10.0, LOG_INTERVAL_HELP, check=log_interval, must=A_LOG_INTERVAL)
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    log_format: str = option("console", "log format", choices=("console", "json"))

    def demand_safe(self) -> None:
        """Raises ConfigError if the cluster token or clients' keys would cross a network in the clear, unasked."""
        self.demand_private(("--control-host", self.control_host))
        if self.tenants:
            demand_private_keys(self.host, bool(self.public_tls_cert or self.tls_cert or self.allow_plain_token))

    def public_certificates(self) -> Certificates | None:
        """Returns what clients are shown, and asked for; None if they are served in the clear. Raises ConfigError."""
        cert, key = self.public_tls_cert, self.public_tls_key
        if not cert and not key:
            cert, key = self.tls_cert, self.tls_key
        if not cert and not key and self.tls_client_ca:
            raise ConfigError("--tls-client-ca needs a certificate: give --public-tls-cert and --public-tls-key")
        return Certificates(cert, key, self.tls_client_ca, flags=PUBLIC_FLAGS) if cert or key else None
