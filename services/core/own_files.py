"""Opens and writes the files that Baton makes: in folders of its own, where somebody else may have put a link or a
pipe, and where a flag names one."""

from __future__ import annotations

import errno
import os
import pathlib
import secrets
import stat

FOR_ALL = 0o666
"""The mode of files without text of clients: the umask decides who else may read them."""


def opened(path: pathlib.Path, flags: int, mode: int = 0o600) -> int:
    """Opens a plain file without following a link, and returns its descriptor. Raises OSError for anything else; a pipe
    without a writer does not keep it waiting."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no plain file", str(path))


def write_whole(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    """Writes the file whole or not at all, in the place of what is there. Raises OSError with `path`."""
    # Containers that share the folder may have processes of one number.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(opened(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError as error:  # a full disk's names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def write_named(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that somebody has named: as `write_whole`, readable by those who could read it before, but into a
    link or a pipe that is there, such as /dev/stdout. Raises OSError with `path`."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        try:
            path.write_bytes(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    else:
        write_whole(path, data, stat.S_IMODE(path.stat().st_mode) if path.exists() else FOR_ALL)
