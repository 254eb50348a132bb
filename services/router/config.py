"""Defines a router's configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from services.core.addresses import bare_host, is_loopback
from services.core.config import (
    A_LOG_INTERVAL,
    DAY_S,
    DEFAULT_CONTROL_PORT,
    DEFAULT_PORT,
    duration_option,
    log_interval,
    option,
    port_option,
    positive_option,
)
from services.core.errors import ConfigError
from services.core.jaeger import A_WEB_ADDRESS, JAEGER_HELP, is_web_address
from services.core.process_config import DrainConfig, ListenConfig, LogConfig, ModelName
from services.router.placement_config import RoutingConfig
from services.router.text.output.families import REASONING_PARSERS, TOOL_PARSERS
from services.rpc.certificates import PUBLIC_FLAGS, Certificates
from services.rpc.membership import MembershipConfig

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?|\*", re.ASCII)


def is_origin(text: str) -> bool:
    """Returns whether `text` is an origin as browsers send it: scheme, host and port, no path; or `*` for any."""
    return _ORIGIN.fullmatch(text) is not None


def objective_ms(value: float) -> bool:
    return 0 < value <= DAY_S * 1000


def _objective_option(default_ms: float, help: str) -> Any:
    return option(default_ms, help, check=objective_ms, must="must be positive, and at most a day")


def demand_private_keys(host: str, is_allowed: bool) -> None:
    """Raises ConfigError if clients' keys would cross a network in the clear on their way to a router that binds the
    host."""
    if not is_allowed and not is_loopback(bare_host(host)):
        raise ConfigError(
            "--tenants: clients' keys would cross the network in the clear: give --public-tls-cert and "
            "--public-tls-key, or --allow-plain-token if the network is private, or something in front speaks TLS"
        )


MOST_TEXT_CHARS = 65_536


def _bytes_option(of: str) -> Any:
    return option(
        64 << 20,
        f"size at which another file of the {of} log begins, bytes; the one before is FILE.1",
        check=lambda v: v >= 4096,
        must="must be at least 4096",
    )


def _files_option(of: str, default: int) -> Any:
    return option(
        default,
        f"files of the {of} log, beyond which the oldest is deleted",
        check=lambda v: 2 <= v <= 10_000,
        must="must be in [2, 10000]",
    )


@dataclass(frozen=True)
class TenantConfig:
    """Keeps the flags."""

    tenants: str = option(
        "",
        "YAML file with the tenants: their keys, limits and models; read again on SIGHUP and when it changes (default: "
        "none, and nobody is asked for a key)",
    )
    routers: int = option(
        0,
        "routers that share the workers, by which each tenant's limits are divided; 0: as many as the workers say",
        check=lambda v: 0 <= v <= 64,
        must="must be in [0, 64]",
    )
    tenants_store: str = option(
        "",
        "Redis-compatible server in which routers share the limits of tenants, such as redis://HOST:6379/0; needs the "
        "extra redis (default: none, and each router takes its part of the limits)",
    )
    usage_log: str = option(
        "",
        "append a JSON line for each request that ended to this file: tenant, tokens and cost, for baton usage and to "
        "bill by (default: none)",
    )
    usage_log_bytes: int = _bytes_option("usage")
    usage_log_files: int = _files_option("usage", 64)
    request_log: str = option(
        "",
        "append a JSON line for each request that ended to this file: tenant, tokens, times, workers and outcome "
        "(default: none)",
    )
    request_log_bytes: int = _bytes_option("request")
    request_log_files: int = _files_option("request", 8)
    request_log_text_chars: int = option(
        0,
        "characters of each prompt, and of each answer, that the request log has, of tenants that allow it; 0: none",
        check=lambda v: 0 <= v <= MOST_TEXT_CHARS,
        must=f"must be in [0, {MOST_TEXT_CHARS}]",
    )


@dataclass(frozen=True)
class PublicConfig(TenantConfig):
    """Keeps the flags that say what clients and browsers get. `baton up` has the same."""

    public_tls_cert: str = option(
        "",
        "PEM file with the certificate that clients are shown over gRPC and HTTP, and those that lead to its CA; read "
        "again when it changes (default: that of --tls-cert)",
    )
    public_tls_key: str = option("", "PEM file with the private key of --public-tls-cert")
    tls_client_ca: str = option(
        "",
        "PEM file with CAs: clients over gRPC and HTTP must show a certificate of one (default: none is asked for)",
    )
    tool_parser: tuple[str, ...] = option(
        (),
        f"how calls of tools are read from outputs, of all models, or as MODEL=NAME of one: {', '.join(TOOL_PARSERS)}; "
        "repeatable (default: as each model's chat template says)",
    )
    reasoning_parser: tuple[str, ...] = option(
        (),
        f"how what a model thinks is told from its answers, of all models, or as MODEL=NAME: "
        f"{', '.join(REASONING_PARSERS)}; repeatable (default: as each model's chat template says)",
    )
    console: bool = option(True, "serve the console, a page that shows the cluster and its requests, on the HTTP port")
    console_token_file: str = option(
        "",
        "file with the token that the console asks for; made if it is not there (default: none is asked for on "
        "loopback, and elsewhere there is no console)",
    )
    jaeger_url: str = option("", JAEGER_HELP, check=lambda url: not url or is_web_address(url), must=A_WEB_ADDRESS)

    def serves_console(self, host: str) -> bool:
        """Returns whether the console is served where the router binds `host`: to everybody on loopback where there are
        no tenants, else only with a token."""
        is_private = is_loopback(bare_host(host)) and not self.tenants
        return self.console and (is_private or bool(self.console_token_file))


@dataclass(frozen=True)
class RouterConfig(LogConfig, DrainConfig, RoutingConfig, PublicConfig, MembershipConfig, ListenConfig, ModelName):
    """Keeps the configuration of a router."""

    # Where the router listens.
    port: int = port_option(DEFAULT_PORT, "gRPC port; 0 picks a free one")
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
    control_host: str = option("127.0.0.1", "address to bind for workers and operators")
    control_port: int = port_option(
        DEFAULT_CONTROL_PORT,
        "gRPC port for workers, baton status, top, slo, explain, drain, calibrate and plan --live; 0 picks a free one",
    )
    max_message_bytes: int = positive_option(16 << 20, "largest request")
    max_text_bytes: int = positive_option(
        2 << 20, "largest prompt text, bytes in UTF-8: what is longer is refused before it is tokenised"
    )
    max_pending_bytes: int = positive_option(
        1 << 30, "bytes of all requests that are read, wait or run at once, over gRPC and HTTP together"
    )
    max_concurrent_rpcs: int = positive_option(
        4096, "gRPC calls at once; when full, one that waits for its client is ended, else the new one refused"
    )
    # Admission.
    max_queue: int = positive_option(1024, "requests of one model that may wait for a worker")
    queue_timeout_s: float = duration_option(120.0, "longest wait for a busy worker, seconds")
    no_worker_timeout_s: float = duration_option(30.0, "longest wait while no worker is ready, seconds")
    aging_s: float = duration_option(
        10.0, "a request that has waited this long is served within a bound, whatever its priority, seconds"
    )
    # Health.
    canaries: bool = option(True, "check workers, and transfers between them, with tiny requests of its own")
    canary_period_s: float = duration_option(
        30.0, "how often a healthy worker is asked again and its answer compared, seconds"
    )
    step_timeout_s: float = duration_option(
        30.0, "a worker whose device step runs longer is stuck: its requests go elsewhere, seconds"
    )
    # Sessions.
    silence_s: float = duration_option(2.0, "a worker silent this long is lost, seconds")
    # Objectives.
    slo_ttft_ms: float = _objective_option(500.0, "objective for the time to the first token, ms")
    slo_tpot_ms: float = _objective_option(
        100.0, "objective for the mean time of a token after the first, ms, for baton slo, top and the console"
    )
    slo_itl_ms: float = _objective_option(
        200.0, "objective for the longest time between two tokens of a request, ms, for baton slo, top and the console"
    )
    slo_e2e_ms: float = _objective_option(5000.0, "objective for the time to the last token, ms")
    slo_queue_ms: float = _objective_option(
        100.0, "objective for the time that a request waits for a worker, ms, for baton slo and the console"
    )
    log_prompts: bool = option(
        False,
        "write prompts to the log, and show prompts and outputs in the console; else neither has text of clients",
    )
    # What is no flag, since nobody would turn it but a test.
    tokenizer_threads: int = 0
    """Threads that tokenise long texts; 0 takes half of the cores."""
    max_models: int = 64
    """Models served at once: the router's own, and those that workers bring. Each takes the memory of its tokenizer."""
    max_workers: int = 1024
    """Workers of one model that may be registered at once."""
    heartbeat_s: float = 0.5
    """Interval of heartbeats to workers."""
    register_s: float = 1.0
    """Interval at which workers register again."""

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
