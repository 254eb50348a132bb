"""Tests what processes show each other, and that no token and no key goes through a network in the clear, unasked."""

from __future__ import annotations

from typing import Any

import pytest

from services.core.errors import ConfigError
from services.router.config import RouterConfig
from services.rpc.membership import MembershipConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig

TLS = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
PUBLIC = {"public_tls_cert": "c", "public_tls_key": "k"}
ALLOWED = {"allow_plain_token": True}


@pytest.mark.parametrize(
    ("kind", "flags", "refused"),
    [
        (RouterConfig, {}, ""),
        (RouterConfig, {"host": "0.0.0.0"}, ""),
        (RouterConfig, {"control_host": "0.0.0.0"}, "--control-host"),
        (RouterConfig, {"control_host": "::"}, "--control-host"),
        (RouterConfig, {"control_host": "::1"}, ""),
        (RouterConfig, {"control_host": "0.0.0.0", **ALLOWED}, ""),
        (RouterConfig, {"control_host": "0.0.0.0", **TLS}, ""),
        (RouterConfig, {"control_host": "0.0.0.0", **PUBLIC}, "--control-host"),
        (RouterConfig, {"tenants": "t.yaml"}, ""),
        (RouterConfig, {"tenants": "t.yaml", "host": "10.0.0.1"}, "--tenants"),
        (RouterConfig, {"tenants": "t.yaml", "host": "10.0.0.1", **ALLOWED}, ""),
        (RouterConfig, {"tenants": "t.yaml", "host": "10.0.0.1", **PUBLIC}, ""),
        (RouterConfig, {"tenants": "t.yaml", "host": "10.0.0.1", **TLS}, ""),
        (WorkerConfig, {"router": ("localhost:50052",)}, ""),
        (WorkerConfig, {"host": "0.0.0.0"}, "--host"),
        (WorkerConfig, {"router": ("127.0.0.1:1", "router:50052")}, "--router"),
        (WorkerConfig, {"router": ("[2001:db8::1]:50052",)}, "--router"),
        (WorkerConfig, {"router": ("router:50052",), "host": "0.0.0.0", **TLS}, ""),
        (WorkerConfig, {"router": ("router:50052",), "host": "0.0.0.0", **ALLOWED}, ""),
        (StoreConfig, {"router": ("router:50052",)}, "--router"),
    ],
)
def test_what_would_be_in_the_clear_is_refused(kind: type[Any], flags: dict[str, Any], refused: str) -> None:
    config = kind(**flags)
    if not refused:
        config.demand_safe()
        return
    with pytest.raises(ConfigError, match=rf"^{refused}: .* in the clear.* --allow-plain-token"):
        config.demand_safe()


def test_roles_need_certificates_and_make_no_token() -> None:
    for auth in ("mtls", "both"):
        with pytest.raises(ConfigError, match=rf"^--cluster-auth: {auth} needs certificates"):
            MembershipConfig(cluster_auth=auth).certificates()
    assert MembershipConfig(cluster_auth="mtls", cluster_token_file="/nowhere/at/all").token() is None
