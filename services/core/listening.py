"""Says why a port cannot be listened on, in the same words whoever finds it: the server itself, or a trial beforehand.

Owns: the words, which name the flag and what to do, and the trial. Never: listens.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from services.core.addresses import join
from services.core.errors import ConfigError
from services.core.printable import printable


def cannot_listen(flag: str, host: str, port: int, error: OSError) -> ConfigError:
    """Returns the error of an attempt to listen on the port that `flag` gives, with the reason `error`."""
    host_flag = "--control-host" if flag == "--control-port" else "--host"
    if isinstance(error, socket.gaierror):
        return ConfigError(f"{host_flag}: {printable(host)} does not resolve here: {error.strerror}")
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        advice = "; 0 picks a free one"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = f"; {host_flag} must be an address of this machine"
    else:
        advice = ""
    return ConfigError(f"{flag}: cannot listen on {join(printable(host), port)}: {error.strerror}{advice}")


def require_free(flag: str, host: str, port: int) -> None:
    """Raises ConfigError if nobody could listen on the port now.

    Call it before slow work, such as loading weights; a port that is taken meanwhile is told by the server that wants
    it. Of a name's addresses one is enough, unless another is in use: its clients would reach somebody else.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(flag, host, port, error) from error
    tried = [_failure(family, address) for family, *_, address in found]
    failures = [failure for failure in tried if failure is not None]
    for failure in failures:
        if len(failures) == len(tried) or failure.errno == errno.EADDRINUSE:
            raise cannot_listen(flag, host, port, failure) from failure


def _failure(family: int, address: Any) -> OSError | None:
    """Returns why a socket cannot be bound to the address, or None if it can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        return error
    return None
