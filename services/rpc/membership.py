"""Defines the flags by which a process shows the others of its cluster that it is one of them, and is shown it.

Owns: what these flags mean together. Never: how it is shown (`authentication.py`, `certificates.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from services.core.addresses import bare_host, is_loopback
from services.core.cluster_token import FILE_HELP, cluster_token
from services.core.config import option
from services.core.errors import ConfigError
from services.core.printable import printable
from services.rpc.certificates import CA_HELP, CERT_HELP, KEY_HELP, Certificates, cluster_certificates

TOKEN, MTLS, BOTH = CLUSTER_AUTH = ("token", "mtls", "both")


@dataclass(frozen=True)
class ClusterAuthConfig:
    """Keeps the flags that say what processes of one cluster show each other. `baton up` has the same."""

    cluster_token_file: str = option("", FILE_HELP)
    cluster_auth: str = option(
        TOKEN,
        "what routers, workers and operators of one cluster show each other, the same on all: the token, certificates "
        "that name their roles (and no token is made or needed), or both",
        choices=CLUSTER_AUTH,
    )
    allow_plain_token: bool = option(
        False,
        "let the cluster token and clients' keys cross networks without TLS, as on a private network; else it is "
        "refused beyond loopback",
    )

    def token(self) -> str | None:
        """Returns the cluster token, which is made if need be; None if it is not used. Raises ConfigError."""
        return None if self.cluster_auth == MTLS else cluster_token(self.cluster_token_file)


@dataclass(frozen=True)
class MembershipConfig(ClusterAuthConfig):
    """Keeps the configuration of a process of a cluster, as one of it."""

    tls_cert: str = option("", CERT_HELP)
    tls_key: str = option("", KEY_HELP)
    tls_ca: str = option("", CA_HELP)

    def demand_private(self, *places: tuple[str, str]) -> None:
        """Raises ConfigError if the cluster token would cross a network in the clear at one of these places, each a
        flag and a host."""
        if self.cluster_auth != MTLS and not self.tls_cert and not self.allow_plain_token:
            for flag, host in places:
                if not is_loopback(bare_host(host)):
                    raise ConfigError(
                        f"{flag}: the cluster token would cross the network in the clear on its way to "
                        f"{printable(host)}: give --tls-cert, --tls-key and --tls-ca, or --allow-plain-token if the "
                        "network is private"
                    )

    @property
    def by_role(self) -> bool:
        """Returns whether callers must show certificates that name their roles."""
        return self.cluster_auth != TOKEN

    def certificates(self) -> Certificates | None:
        """Returns the process's certificates in the cluster; None without TLS. Raises ConfigError."""
        certificates = cluster_certificates(self.tls_cert, self.tls_key, self.tls_ca)
        if certificates is None and self.by_role:
            raise ConfigError(
                f"--cluster-auth: {self.cluster_auth} needs certificates: give --tls-cert, --tls-key and --tls-ca"
            )
        return certificates
