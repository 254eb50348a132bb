"""Reads or makes the cluster token, the secret that routers, workers and operators of one cluster share.

The rules are in docs/security.md. Owns: where the token comes from, how it is made, and which files are refused because
others could know it. Never: where it is required or sent (`services/rpc`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Mapping

from services.core.errors import ConfigError
from services.core.home import baton_home
from services.core.printable import printable

logger = logging.getLogger(__name__)

FLAG = "--cluster-token-file"
VARIABLE = "BATON_CLUSTER_TOKEN"
FILE_HELP = (
    "file with the token that routers, workers and operators of one cluster share; made if it is not there (default: "
    "the value of BATON_CLUSTER_TOKEN, else the file cluster-token in BATON_HOME)"
)
_ADVICE = f"{FLAG}, or {VARIABLE}, must give the token that the router has"

# A Bearer credential (RFC 6750), too long to be guessed.
_FORM = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_MAX_FILE_BYTES = 4096


def with_advice(refusal: str) -> str:
    """Returns what a router has said to a caller that it does not know, and what to do where that was of the token."""
    return f"{refusal}; {_ADVICE}" if "cluster token" in refusal else refusal


def cluster_token(path: str = "", environ: Mapping[str, str] | None = None, *, make: bool = True) -> str:
    """Returns the token from the file at `path`, else from the variable, else from the default file.

    A file that does not exist is made, readable by its owner only; if several processes start at once, one makes it and
    all get the same token. Without `make` no file is made, and the token is empty if there is no default file. Raises
    ConfigError, which names the flag or the variable and says what to do; its message never shows the token.
    """
    environ = os.environ if environ is None else environ
    if not path and VARIABLE in environ:
        return _checked(environ[VARIABLE], VARIABLE)
    file = pathlib.Path(path).expanduser() if path else baton_home(environ) / "cluster-token"
    try:
        token = _read_or_make(file, FLAG) if make else _read(file, FLAG)
    except OSError as error:
        advice = f"name a file that can be read, or made, or set {VARIABLE}"
        if not path:
            advice += ", or set BATON_HOME to a folder that can be written"
        raise ConfigError(f"{FLAG}: {file}: {error.strerror or error}; {advice}") from error
    if token is None and (make or path):
        raise ConfigError(f"{FLAG}: there is no {file}; name the file that the router has, or set {VARIABLE}")
    return token or ""


def token_of_file(path: str, flag: str) -> str:
    """Returns the token in the file, which is made if it is not there, by the rules of the cluster's token. `flag` is
    the one that names the file. Raises ConfigError."""
    file = pathlib.Path(path).expanduser()
    try:
        token = _read_or_make(file, flag)
    except OSError as error:
        raise ConfigError(f"{flag}: {file}: {error.strerror or error}") from error
    assert token is not None, "it is there once it is made"
    return token


def _read_or_make(file: pathlib.Path, flag: str) -> str | None:
    """Returns the token in `file`, which is made if it is not there; None if somebody has removed it again."""
    token = _read(file, flag)
    if token is None:
        _make(file, flag)
        token = _read(file, flag)
    return token


def _read(file: pathlib.Path, flag: str) -> str | None:
    """Returns the token in `file`, or None if there is no such file. Raises ConfigError or OSError."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO must not block
    except FileNotFoundError:
        return None
    try:
        require_private(fd, file, flag)
        data = os.read(fd, _MAX_FILE_BYTES)
    finally:
        os.close(fd)
    return _checked(data.decode("ascii", errors="replace").strip(), f"{flag}: {file}")


def require_private(fd: int, file: pathlib.Path | str, flag: str, secret: str = "token") -> None:
    """Raises ConfigError if another user can open the file: who can write it chooses the secret, who can read it has
    it.

    A regular file on a read-only mount is accepted as it is: orchestrators hand secrets to containers that way, with
    modes (0444) and owners that nobody inside can change.
    """
    status, name = os.fstat(fd), printable(str(file))
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{flag}: {name} is not a regular file")
    if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
        return
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"{flag}: {name} belongs to user {status.st_uid}, who may know the {secret}; use a file of yours"
        )
    if status.st_mode & 0o077:
        mode, anew = stat.S_IMODE(status.st_mode), ", and a new one is made" if secret == "token" else ""
        raise ConfigError(
            f"{flag}: other users may open {name} (mode {mode:04o}): remove it if they may know the {secret} by now"
            f"{anew}; else chmod 600 it"
        )


def _checked(token: str, origin: str) -> str:
    if not _FORM.fullmatch(token):
        raise ConfigError(f"{origin}: a token has 16 to 256 characters of A-Z a-z 0-9 . _ ~ + / = -")
    return token


def _make(file: pathlib.Path, flag: str) -> None:
    """Makes `file` with a new token: complete, and private to its owner, as soon as it exists. If another process makes
    the file first, that one stays."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as stream:
            stream.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)  # unlike a rename, it never replaces a file of another process
            logger.info("made the token of %s: %s", flag, file)
    finally:
        os.unlink(draft)
