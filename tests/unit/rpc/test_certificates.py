"""Tests which files are taken for certificates, that they are read again, and what sockets made of them let in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import logging
import os
import re
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from services.cli import certs
from services.cli.certs import make_certificates
from services.core.errors import ConfigError
from services.rpc.authentication import identity, server_name
from services.rpc.certificates import PUBLIC_FLAGS, Certificates, cluster_certificates
from tests.support.certificates import certificates, expired, written

_DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "tls")


def _other_key(folder: Path) -> None:
    shutil.copy(folder / "worker.key", folder / "router.key")


def _encrypted(folder: Path) -> None:
    key, how = rsa.generate_private_key(65537, 2048), BestAvailableEncryption(b"secret")
    (folder / "router.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how))


def _strange_key(at: bytes, put: bytes) -> Callable[[Path], object]:
    """Returns what changes bytes of the certificate, whose own form stays right."""

    def spoil(folder: Path) -> None:
        der = x509.load_pem_x509_certificate((folder / "router.pem").read_bytes()).public_bytes(Encoding.DER)
        body = base64.encodebytes(der.replace(at, put))
        (folder / "router.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\n%b-----END CERTIFICATE-----\n" % body)

    return spoil


def _fifo(folder: Path) -> None:
    (folder / "router.pem").unlink()
    os.mkfifo(folder / "router.pem")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no certificate": (lambda at: (at / "router.pem").unlink(), r"^--tls-cert: .*router.pem: No such file"),
    "no key": (lambda at: (at / "router.key").unlink(), r"^--tls-key: .*router.key: No such file"),
    "no CA": (lambda at: (at / "ca.pem").unlink(), r"^--tls-ca: .*ca.pem: No such file"),
    "an empty certificate": (lambda at: (at / "router.pem").write_bytes(b""), r"^--tls-cert: .*no certificate in PEM"),
    "an empty CA": (lambda at: (at / "ca.pem").write_bytes(b""), r"^--tls-ca: .*no certificate in PEM"),
    "bytes": (lambda at: (at / "router.pem").write_bytes(bytes(range(256))), r"^--tls-cert: .*no certificate in PEM"),
    "a key of bytes": (lambda at: (at / "router.key").write_bytes(b"\xff" * 99), r"^--tls-key: .*no.* private key in"),
    "another's key": (_other_key, r"^--tls-key: .*not the key of --tls-cert"),
    "a key with a password": (_encrypted, r"^--tls-key: .*encrypted"),
    "a key for all": (lambda at: (at / "router.key").chmod(0o644), r"^--tls-key: other users may open .*chmod 600"),
    "an unknown curve": (_strange_key(b"\xce\x3d\x03\x01\x07", b"\xce\x3d\x03\x01\x63"), r"^--tls-cert, .*used: Curve"),
    "a point that is none": (
        _strange_key(b"\x03\x42\x00\x04", b"\x03\x42\x00\x09"),
        r"^--tls-cert, .*used: Invalid key",
    ),
    "a FIFO": (_fifo, r"^--tls-cert: .*not a regular file"),
    "an expired one": (lambda at: written(at, expired()), r"^--tls-cert: .*has expired, on "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_used_is_refused_by_the_flags_name(folder: Path, what: str) -> None:
    spoil, message = WRONG[what]
    spoil(folder)
    with pytest.raises(ConfigError, match=message):
        certificates(folder, "router")


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_used_changes_nothing(folder: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever accepts connections asks for what is newest, and must get an answer."""
    held = certificates(folder, "router")
    before = held.current()
    spoil, message = WRONG[what]
    spoil(folder)
    assert held.current() is before
    assert re.search(message, caplog.records[-1].getMessage())


def test_what_was_mended_and_is_wrong_again_is_told_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    held, file = certificates(folder, "router"), folder / "router.pem"
    right = file.read_bytes()
    for _ in range(2):
        for data in (b"", right):
            file.write_bytes(data)
            held.current()
            held.current()
    assert caplog.text.count("no certificate in PEM") == 2


def test_want_of_descriptors_changes_nothing(folder: Path) -> None:
    held = certificates(folder, "router")
    before = held.current()
    written(folder)
    with mock.patch.object(os, "memfd_create", side_effect=OSError(errno.EMFILE, "Too many open files")):
        assert held.current() is before
    assert held.current() is not before


def test_one_that_begins_tomorrow_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--tls-cert: .*valid only from"):
        certificates(folder, "router", wall_s=lambda: time.time() - _DAY_S)


def test_a_key_on_a_read_only_mount_is_taken_as_it_is(folder: Path) -> None:
    (folder / "router.key").chmod(0o444)
    with mock.patch.object(os, "fstatvfs", return_value=mock.Mock(f_flag=os.ST_RDONLY)):
        assert certificates(folder, "router").serial


def test_a_ca_with_a_negative_serial_number_is_trusted_without_a_word(folder: Path) -> None:
    """Machines trust some that have one, and `--tls-ca system` names them all. Warnings fail tests."""
    file = folder / "ca.pem"
    ca = x509.load_pem_x509_certificate(file.read_bytes())
    serial = ca.serial_number.to_bytes(20)
    der = ca.public_bytes(Encoding.DER).replace(serial, bytes([serial[0] | 0x80]) + serial[1:])
    file.write_text(ssl.DER_cert_to_PEM_cert(der))
    assert Certificates(ca=str(file)).peer_context().cert_store_stats()["x509_ca"] == 1


def test_a_process_of_a_cluster_has_all_three_or_none(folder: Path) -> None:
    files = [str(folder / name) for name in ("worker.pem", "worker.key", "ca.pem")]
    assert cluster_certificates("", "", "") is None
    whole = cluster_certificates(*files)
    assert whole is not None
    assert whole.demands_peers
    for index, flag in enumerate(("--tls-cert", "--tls-key", "--tls-ca")):
        with pytest.raises(ConfigError, match=f"^{flag} is missing"):
            cluster_certificates(*(file if index != each else "" for each, file in enumerate(files)))


def test_messages_name_the_flags_of_the_public_certificate(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--public-tls-key is missing"):
        Certificates(str(folder / "router.pem"), flags=PUBLIC_FLAGS)
    with pytest.raises(ConfigError, match=r"^--tls-client-ca: "):
        Certificates(ca=str(folder / "none"), flags=PUBLIC_FLAGS)


def test_roles_stand_in_them_and_only_servers_can_be_servers() -> None:
    files = make_certificates(["example.test", "10.1.2.3"])
    for role in ("router", "worker", "store", "operator", "client"):
        extensions = x509.load_pem_x509_certificate(files[f"{role}.pem"]).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [identity(role)]
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        is_server = role in ("router", "worker", "store")
        here = ["localhost", "example.test", "127.0.0.1", "::1", "10.1.2.3"]
        assert hosts == ([server_name(role), *here] if is_server else [])
        uses = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (x509.oid.ExtendedKeyUsageOID.SERVER_AUTH in uses) is is_server


def test_the_ca_comes_last_so_that_a_folder_with_one_is_whole(tmp_path: Path) -> None:
    """docker-compose.tls.yml goes by it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder = tmp_path / "tls"
    for num_written in range(1, len(make_certificates())):
        with mock.patch.object(os, "open", side_effect=_opening(num_written, full)), pytest.raises(ConfigError):
            certs.main(["dev", str(folder)], "baton certs")
        assert not (folder / "ca.pem").exists()
        shutil.rmtree(folder)


def _opening(number: int, then: OSError) -> Callable[..., int]:
    """Returns what opens that many files, and then raises."""
    opened, left = os.open, iter(range(number))

    def open_(*args: Any) -> int:
        if next(left, None) is None:
            raise then
        return opened(*args)

    return open_


def test_it_is_warned_of_once_a_day_when_it_expires_soon(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [time.time()]
    caplog.set_level(logging.INFO, "services.rpc.certificates")
    held = certificates(folder, "router", wall_s=lambda: now[0])
    assert held.expires_in_s() == pytest.approx(90 * _DAY_S, abs=60)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    now[0] += 84 * _DAY_S
    for _ in range(3):
        held.current()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "EXPIRES in 6.0 days" in caplog.text
    now[0] += 7 * _DAY_S
    held.current()
    assert "HAS EXPIRED" in caplog.text


def test_a_broken_file_leaves_what_was_read_and_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = certificates(folder, "router")
    before, new = held.serial, make_certificates()
    (folder / "router.pem").write_bytes(new["router.pem"])  # and the key not yet
    for _ in range(3):
        assert held.serial == before
    assert len(caplog.records) == 1
    assert "not the key of --tls-cert; the certificates that were read before stay" in caplog.text
    written(folder, new)
    assert held.serial == x509.load_pem_x509_certificate(new["router.pem"]).serial_number


def test_files_that_are_written_again_as_they_were_change_nothing(folder: Path) -> None:
    held = certificates(folder, "router")
    before = held.current()
    written(folder, {file.name: file.read_bytes() for file in folder.iterdir()})
    assert held.current() is before


def test_files_are_looked_at_once_a_second(folder: Path) -> None:
    held = certificates(folder, "router", look_every_s=1.0)
    with mock.patch.object(os, "stat", side_effect=AssertionError("looked")):
        for _ in range(1000):
            held.current()


@contextlib.asynccontextmanager
async def _serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(await reader.read(5))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def _serial_at(port: int, context: ssl.SSLContext) -> int:
    """Returns the serial number that the server shows, once it has answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number
    finally:
        writer.close()


async def test_both_ends_show_certificates_of_the_ca(folder: Path, tmp_path: Path) -> None:
    worker = certificates(folder, "worker")
    stranger = certificates(written(tmp_path / "other"), "worker")
    only_ca = Certificates(ca=str(folder / "ca.pem"))
    refused = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)
    async with _serving(worker.server_context()) as port:
        assert await _serial_at(port, certificates(folder, "store").peer_context()) == worker.serial
        for context in (stranger.peer_context(), only_ca.peer_context()):
            with pytest.raises(refused):
                await _serial_at(port, context)
    async with _serving(certificates(folder, "client").server_context()) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
            await _serial_at(port, worker.peer_context())


async def test_no_session_goes_on_where_certificates_are_asked_for(folder: Path) -> None:
    """It would not be checked by the CAs of then: TLS 1.2 can resume one by itself, and 1.3 by a ticket."""
    old = certificates(folder, "worker").peer_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    public = Certificates(str(folder / "router.pem"), str(folder / "router.key"))
    async with _serving(public.server_context()) as port:
        assert await _serial_at(port, old) == public.serial
    async with _serving(certificates(folder, "router").server_context()) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await _serial_at(port, old)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=certificates(folder, "worker").peer_context()
        )
        writer.write(b"hello")
        await reader.readexactly(5)
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        writer.close()
