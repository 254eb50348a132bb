"""Runs `baton certs`: makes a CA and certificates for a try-out of TLS.

Owns: what these certificates say. Never: how a process uses them (`rpc/certificates.py`), or any for production, where
keys are made and kept by something that renews them.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import pathlib
from collections.abc import Iterable, Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.cli.arguments import Parser
from services.core.errors import ConfigError
from services.core.printable import printable
from services.rpc.authentication import OPERATOR, ROUTER, STORE, WORKER, identity, server_name

CLIENT = "client"
"""The role of who only sends requests. No service of the cluster asks for it."""
_SERVERS, _CLIENTS = (ROUTER, WORKER, STORE), (OPERATOR, CLIENT)
_HOSTS = ("localhost", "127.0.0.1", "::1")
_DAYS = 90
_MOST_DAYS = 3650


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Certificates for TLS.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="dev", parser_class=Parser)
    dev = actions.add_parser("dev", help="make a CA and a certificate for each role, to try TLS out with")
    dev.add_argument("directory", metavar="DIR", help="where the files go; made if it is not there")
    dev.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or IP address at which routers, workers or stores are reached, beside those of loopback; repeatable",
    )
    dev.add_argument(
        "--days", type=int, default=_DAYS, metavar="N", help="days until they expire (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.days <= _MOST_DAYS:
        raise ConfigError(f"--days: {arguments.days} must be in [1, {_MOST_DAYS}]")
    directory = pathlib.Path(arguments.directory)
    files = make_certificates(arguments.host, datetime.timedelta(days=arguments.days))
    _write(directory, files)
    print(
        f"{printable(str(directory))}: ca.pem with its ca.key, and NAME.pem with NAME.key for "
        f"{', '.join((*_SERVERS, *_CLIENTS))}; they expire in {arguments.days} days.\n"
        "They are for trying out: whoever has ca.key can be anybody. A real CA keeps its key, and renews."
    )
    return 0


def make_certificates(
    hosts: Iterable[str] = (), valid_for: datetime.timedelta = datetime.timedelta(days=_DAYS)
) -> dict[str, bytes]:
    """Returns PEM files by name: a certificate and key for each role, and at the end their new CA, so that where files
    are written in this order a folder with a CA has all of them.

    Servers' certificates name the `hosts`, beside loopback; those of operators and clients cannot be a server's, so
    that none of them can pass for a router. Raises ConfigError if a host is no name or address.
    """
    names = [_name_of(host) for host in (*_HOSTS, *hosts)]
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _certificate("Baton try-out CA", ca_key, None, valid_for, []).sign(ca_key, hashes.SHA256())
    files = {"ca.key": _key_pem(ca_key)}
    for role in (*_SERVERS, *_CLIENTS):
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity(role))]
        if role in _SERVERS:
            alternatives += [x509.DNSName(server_name(role)), *names]
        certificate = _certificate(f"baton {role}", key, ca, valid_for, alternatives).sign(ca_key, hashes.SHA256())
        files |= {f"{role}.pem": _pem(certificate), f"{role}.key": _key_pem(key)}
    return files | {"ca.pem": _pem(ca)}


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    valid_for: datetime.timedelta,
    alternatives: Sequence[x509.GeneralName],
) -> x509.CertificateBuilder:
    """Returns what is to be signed: a CA's own certificate if `ca` is None. One that names no host is a client's."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=subject if ca is None else ca.subject,
        subject_name=subject,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        # Clocks of machines differ. The times are in order whatever `valid_for` is: tests make some that have expired.
        not_valid_before=min(now, now + valid_for) - datetime.timedelta(minutes=5),
        not_valid_after=now + valid_for,
    )
    is_ca = ca is None
    uses = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    usage = x509.KeyUsage(digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, decipher_only=False, **uses)
    builder = builder.add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    if ca is None:
        return builder
    is_server = any(not isinstance(each, x509.UniformResourceIdentifier) for each in alternatives)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if is_server else [])]
    of_ca = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(of_ca)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(authority, critical=False)
    return builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)


def _name_of(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        return x509.DNSName(host.encode("idna").decode("ascii"))
    except UnicodeError:
        raise ConfigError(f"--host: {host!r} is no name or IP address") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(directory: pathlib.Path, files: dict[str, bytes]) -> None:
    """Writes files that only their owner may read if they are keys. Raises ConfigError rather than replace one."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in files:
            if os.path.lexists(directory / name):
                raise ConfigError(f"{printable(str(directory / name))} is there already: name another folder")
        for name, data in files.items():
            mode = 0o600 if name.endswith(".key") else 0o644
            fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with open(fd, "wb") as stream:
                stream.write(data)
    except OSError as error:
        raise ConfigError(f"{printable(str(error.filename or directory))}: {error.strerror or error}") from error
