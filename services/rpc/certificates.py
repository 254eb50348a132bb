"""Holds a process's certificate, its key and the authorities (CAs) that it trusts, and gives what TLS is made of.

The rules are in docs/security.md. Owns: the PEM files on their way from the disk, at the start and while the process
runs, and when it is said that a certificate expires. A file that cannot be taken changes nothing: what was read before
stays. Never: where TLS is required, or what a certificate's role may do (`authentication.py`).
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from services.core.cluster_token import require_private
from services.core.errors import ConfigError
from services.core.file_stamps import FileStamp, stamp_of
from services.core.printable import printable

log = logging.getLogger(__name__)

CERT_HELP = "PEM file with this process's certificate, and those that lead to its CA; read again when it changes"
KEY_HELP = "PEM file with the private key of --tls-cert"
CA_HELP = "PEM file with the CAs of the cluster's certificates: with it, peers are asked for one"
LOOK_EVERY_S = 1.0
"""How often the files are looked at, at the most: when somebody connects, and by `watch`."""
SOON_S = 7 * 86_400.0
"""A certificate that expires within this many seconds is warned of, once a day."""
_DAY_S = 86_400.0

_Stamps = tuple[FileStamp | None, ...]


@dataclass(frozen=True)
class TlsFlags:
    """Names the flags of one certificate, for messages."""

    cert: str = "--tls-cert"
    key: str = "--tls-key"
    ca: str = "--tls-ca"


CLUSTER_FLAGS = TlsFlags()
PUBLIC_FLAGS = TlsFlags("--public-tls-cert", "--public-tls-key", "--tls-client-ca")


@dataclass(frozen=True)
class _Own:
    """Is a certificate with its key, as PEM."""

    chain: bytes
    key: bytes
    leaf: x509.Certificate


@dataclass(frozen=True)
class _Loaded:
    """Is what was read at one time, which belongs together."""

    own: _Own | None
    authorities: bytes | None
    server: ssl.SSLContext | None
    peer: ssl.SSLContext | None


class Certificates:
    """Gives credentials of gRPC and contexts of sockets, made of the files as they are now. It may be used by any
    thread."""

    def __init__(
        self,
        cert: str = "",
        key: str = "",
        ca: str = "",
        *,
        flags: TlsFlags = CLUSTER_FLAGS,
        wall_s: Callable[[], float] = time.time,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """Reads the files. A certificate needs its key; the CAs are what peers' certificates are checked by.

        `wall_s` gives Unix seconds, by which certificates expire. Raises ConfigError, which names the flag.
        """
        for given, missing, flag in ((cert, key, flags.key), (key, cert, flags.cert)):
            if given and not missing:
                raise ConfigError(f"{flag} is missing: {flags.cert} and {flags.key} go together")
        self._files = cert, key, ca
        self._flags = flags
        self._wall_s = wall_s
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._looked_s = time.monotonic()
        self._warned_s = -_DAY_S
        """The Unix second of the last warning that the certificate expires."""
        self._complaint = ""
        """Why the files could not be taken the last time: it is said once."""
        self._stamps = self._stamps_now()
        self._loaded = self._load()
        self._say_expiry()

    @property
    def demands_peers(self) -> bool:
        """Returns whether a server with these certificates asks its clients for one."""
        return bool(self._files[2])

    @property
    def serial(self) -> int:
        """Returns the serial number of the certificate in use; 0 without one."""
        own = self.current().own
        return own.leaf.serial_number if own is not None else 0

    def expires_in_s(self) -> float:
        """Returns the seconds until the certificate expires; infinity without one."""
        own = self.current().own
        return own.leaf.not_valid_after_utc.timestamp() - self._wall_s() if own is not None else float("inf")

    # For gRPC

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of a server, with which each new connection gets the newest certificate. Clients must
        show certificates if CAs were given."""
        given = self.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            newest = self.current()
            if newest is given:
                return None  # else the runtime would make all anew for each connection
            given = newest
            return _for_grpc(newest)

        # Its stub does not know that nothing may be returned for nothing new.
        return grpc.dynamic_ssl_server_credentials(_for_grpc(given), fetch, self.demands_peers)  # type: ignore[arg-type]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials of channels that are opened now. Without CAs those of the system are trusted."""
        loaded = self.current()
        own = loaded.own
        return grpc.ssl_channel_credentials(
            loaded.authorities, own.key if own is not None else None, own.chain if own is not None else None
        )

    # For sockets

    def server_context(self) -> ssl.SSLContext:
        """Returns a context for a connection that is accepted now. Clients must show certificates if CAs were given."""
        context = self.current().server
        assert context is not None, "a server has a certificate"
        return context

    def peer_context(self) -> ssl.SSLContext:
        """Returns a context for a connection that is opened now to whoever has a certificate, whatever its host: the
        caller looks at the role that it names."""
        context = self.current().peer
        assert context is not None, "without CAs nobody can be trusted"
        return context

    # The files

    def current(self) -> _Loaded:
        """Returns what the files hold, looking at them again if that was not done within the last second. Never
        raises."""
        if time.monotonic() - self._looked_s >= self._look_every_s and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looked_s = time.monotonic()
                self._lock.release()
        return self._loaded

    async def watch(self) -> None:
        """Looks at the files every second until it is cancelled, so that expiry is told though nobody connects."""
        while True:
            await asyncio.to_thread(self.current)
            await asyncio.sleep(self._look_every_s)

    def _look(self) -> None:
        stamps = self._stamps_now()
        if stamps != self._stamps:
            try:
                loaded = self._load()
            except ConfigError as error:
                if str(error) != self._complaint:
                    log.error("%s; the certificates that were read before stay", error)
                self._complaint = str(error)
                return  # and it is tried again: of two files that change, one comes first
            self._stamps, self._complaint = stamps, ""
            if (loaded.own, loaded.authorities) == (self._loaded.own, self._loaded.authorities):
                return  # the files were written again as they were: connections need not be made anew
            self._loaded, self._warned_s = loaded, -_DAY_S
            self._say_expiry()
        elif self._wall_s() - self._warned_s >= _DAY_S:
            self._warn()

    def _say_expiry(self) -> None:
        own = self._loaded.own
        if own is not None:
            until = own.leaf.not_valid_after_utc
            file = printable(self._files[0])
            log.info("%s: %s, serial %x, expires on %s", self._flags.cert, file, own.leaf.serial_number, until)
            self._warn()

    def _warn(self) -> None:
        own = self._loaded.own
        if own is None:
            return
        left_s = own.leaf.not_valid_after_utc.timestamp() - self._wall_s()
        if left_s < SOON_S:
            self._warned_s = self._wall_s()
            when = f"EXPIRES in {left_s / _DAY_S:.1f} days" if left_s > 0 else "HAS EXPIRED"
            log.warning("%s: %s %s: put a new one in its place", self._flags.cert, printable(self._files[0]), when)

    def _stamps_now(self) -> _Stamps:
        return tuple(stamp_of(file) for file in self._files if file)

    def _load(self) -> _Loaded:
        """Reads the files. Raises ConfigError, which names the flag."""
        cert, key, ca = self._files
        try:
            own = self._read_own(cert, key) if cert else None
            authorities = None
            if ca:
                authorities = _read(ca, self._flags.ca)
                _require_authorities(authorities, f"{self._flags.ca}: {printable(ca)}")
            return _Loaded(
                own=own,
                authorities=authorities,
                server=None if own is None else _server_context(own, authorities),
                peer=None if authorities is None else _peer_context(own, authorities),
            )
        except ConfigError:
            raise
        except Exception as error:  # the libraries raise errors of several kinds, as of a key of an unknown form
            flags = [flag for flag, file in zip(astuple(self._flags), self._files, strict=True) if file]
            raise ConfigError(f"{', '.join(flags)}: what is in these files cannot be used: {error}") from error

    def _read_own(self, cert: str, key: str) -> _Own:
        chain, secret = _read(cert, self._flags.cert), _read(key, self._flags.key, is_secret=True)
        cert_origin, key_origin = f"{self._flags.cert}: {printable(cert)}", f"{self._flags.key}: {printable(key)}"
        leaf = _leaf_of(chain, cert_origin)
        try:
            private = load_pem_private_key(secret, password=None)
        except TypeError:
            raise ConfigError(f"{key_origin}: the key is encrypted; give one that is not") from None
        except Exception as error:  # it raises errors of several kinds
            raise ConfigError(f"{key_origin}: it is not a private key in PEM") from error
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if private.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
            raise ConfigError(f"{key_origin}: it is not the key of {self._flags.cert}")
        now = datetime.datetime.fromtimestamp(self._wall_s(), datetime.UTC)
        if now >= leaf.not_valid_after_utc:
            raise ConfigError(f"{cert_origin}: the certificate has expired, on {leaf.not_valid_after_utc}")
        if now < leaf.not_valid_before_utc:
            raise ConfigError(f"{cert_origin}: the certificate is valid only from {leaf.not_valid_before_utc} on")
        return _Own(chain, secret, leaf)


def cluster_certificates(cert: str, key: str, ca: str) -> Certificates | None:
    """Returns the certificates of a process of a cluster, or None if no flag of them is given.

    Such a process is both server and client of others, so that it needs all three. Raises ConfigError.
    """
    given = {CLUSTER_FLAGS.cert: cert, CLUSTER_FLAGS.key: key, CLUSTER_FLAGS.ca: ca}
    if not any(given.values()):
        return None
    for flag, file in given.items():
        if not file:
            raise ConfigError(f"{flag} is missing: {', '.join(given)} go together")
    return Certificates(cert, key, ca)


def _for_grpc(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    assert loaded.own is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(loaded.own.key, loaded.own.chain)], loaded.authorities)


def _server_context(own: _Own, authorities: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A session that goes on would not have its certificate checked by the CAs of now; with 1.3 and no tickets, none is.
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if authorities is None else ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])  # only clients of HTTP say what they speak
    if authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, authorities)
    _give(context, own)
    return context


def _peer_context(own: _Own | None, authorities: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    _trust(context, authorities)
    if own is not None:
        _give(context, own)
    return context


def _trust(context: ssl.SSLContext, authorities: bytes) -> None:
    context.load_verify_locations(cadata=authorities.decode("ascii", errors="replace"))


def _give(context: ssl.SSLContext, own: _Own) -> None:
    """Gives the context the certificate as it was read. The library takes only files, and those may have changed."""
    fd = os.memfd_create("baton-certificate", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as stream:
            stream.write(own.key + b"\n" + own.chain)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _leaf_of(chain: bytes, origin: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(chain)[0]
    except Exception as error:  # it raises errors of several kinds
        raise _no_certificate(origin) from error


def _require_authorities(data: bytes, origin: str) -> None:
    """Raises ConfigError unless TLS itself takes the CAs: among those of a machine are some that `x509` warns of."""
    try:
        _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), data)
    except (ssl.SSLError, ValueError) as error:
        raise _no_certificate(origin) from error


def _no_certificate(origin: str) -> ConfigError:
    return ConfigError(f"{origin}: there is no certificate in PEM in it")


def _read(file: str, flag: str, *, is_secret: bool = False) -> bytes:
    origin = f"{flag}: {printable(file)}"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not block
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{origin}: it is not a regular file")
            if is_secret:
                require_private(fd, file, flag, "key")
            with open(fd, "rb", closefd=False) as stream:
                return stream.read()
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{origin}: {error.strerror or error}") from error
