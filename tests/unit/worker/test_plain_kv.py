"""Tests which ways of KV are refused to a worker that has TLS."""

from __future__ import annotations

import pytest

from services.core.errors import ConfigError
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig
from services.worker.transfer import demand_encryption

ELSEWHERE, HERE = {"AWS_ENDPOINT_URL": "HTTP://minio:9000"}, {"aws_endpoint_url_s3": "http://[::1]:9000"}


@pytest.mark.parametrize("config", [WorkerConfig, StoreConfig])
@pytest.mark.parametrize(
    ("flags", "environ", "what"),
    [
        ({"transport": "nixl"}, {}, "--transport: nixl"),
        ({"kv_backend": "redis://:secret@cache:6379/0"}, {}, "--kv-backend"),
        ({"kv_backend": "redis:///0?host=10.0.0.1"}, {}, "--kv-backend"),
        ({"kv_backend": "redis://[not a host/0"}, {}, "--kv-backend"),
        ({"kv_backend": "s3://kv/baton"}, ELSEWHERE, "--kv-backend"),
    ],
)
def test_what_is_in_the_clear_is_refused_unless_it_is_allowed(
    config: type[WorkerConfig | StoreConfig], flags: dict[str, str], environ: dict[str, str], what: str
) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        demand_encryption(config(**flags), has_tls=True, environ=environ)
    assert "--allow-plain-kv" in str(refused.value)
    assert "secret" not in str(refused.value)
    demand_encryption(config(**flags, allow_plain_kv=True), has_tls=True, environ=environ)
    demand_encryption(config(**flags), has_tls=False, environ=environ)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        *(({"transport": name}, {}) for name in ("auto", "shm", "tcp", "grpc")),
        ({}, ELSEWHERE),
        ({"kv_backend": "rediss://cache:6379/0"}, ELSEWHERE),
        ({"kv_backend": "unix:///run/redis.sock"}, {}),
        ({"kv_backend": "redis://127.0.0.1:6379/0"}, {}),
        ({"kv_backend": "redis://localhost/0"}, {}),
        ({"kv_backend": "s3://kv/baton"}, {}),
        ({"kv_backend": "s3://kv/baton"}, HERE),
        ({"kv_backend": "s3://kv/baton"}, {"AWS_ENDPOINT_URL": "https://minio:9000"}),
    ],
)
def test_what_is_encrypted_or_stays_here_is_not(flags: dict[str, str], environ: dict[str, str]) -> None:
    demand_encryption(WorkerConfig(**flags), has_tls=True, environ=environ)
