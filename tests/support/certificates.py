"""Provides files with certificates, as `baton certs dev` makes them, for tests of TLS."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtensionOID

from services.cli.certs import make_certificates
from services.rpc.certificates import Certificates


def written(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Writes the files, by default new ones, each in the place of what was there, and returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, data in (files or make_certificates()).items():
        draft = folder / f".{name}"
        draft.write_bytes(data)
        draft.chmod(0o600)
        os.replace(draft, folder / name)
    return folder


def expired() -> dict[str, bytes]:
    return make_certificates(valid_for=datetime.timedelta(days=-1))


def certificates(folder: Path, role: str, **options: Any) -> Certificates:
    """Returns the role's certificates, looked at again whenever they are used."""
    options = {"look_every_s": 0.0, **options}
    return Certificates(*(str(folder / name) for name in (f"{role}.pem", f"{role}.key", "ca.pem")), **options)


def naming(folder: Path, name: str, *uris: bytes) -> Certificates:
    """Returns certificates of the folder's CA, in files that begin with `name`, with alternative names of any bytes."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key: Any = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    alternatives = _der(0x30, b"".join(_der(0x86, uri) for uri in uris))
    certificate = x509.CertificateBuilder(
        issuer_name=ca.subject,
        subject_name=x509.Name([]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(minutes=5),
        not_valid_after=now + datetime.timedelta(days=90),
        extensions=[
            x509.Extension(
                ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
                True,
                x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, alternatives),
            )
        ],
    ).sign(ca_key, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    written(folder, {f"{name}.pem": certificate.public_bytes(Encoding.PEM), f"{name}.key": pem})
    return certificates(folder, name)


def _der(tag: int, value: bytes) -> bytes:
    size = len(value)
    long = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, *((size,) if size < 0x80 else (0x80 | len(long), *long)))) + value


def tls_flags(folder: Path | None, role: str) -> dict[str, Any]:
    """Returns what configures a process of a cluster without a token; nothing without a folder."""
    if folder is None:
        return {}
    files = {"tls_cert": f"{role}.pem", "tls_key": f"{role}.key", "tls_ca": "ca.pem"}
    return {"cluster_auth": "mtls", **{flag: str(folder / file) for flag, file in files.items()}}
