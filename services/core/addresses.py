"""Parses and checks addresses of the form HOST:PORT, where HOST is a name or an IP address, IPv6 in brackets."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MAX_NAME_CHARS = 253
_LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))


def parse(address: str) -> tuple[str, int]:
    """Returns (host without brackets, port). Raises ValueError if `address` does not have the form HOST:PORT, or names
    a port on which nobody can listen."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isascii() or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT with a port of 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise ValueError(f"{address!r} is not HOST:PORT: {host} is no IPv6 address") from None
    if not _is_name(host):
        raise ValueError(f"{address!r} is not HOST:PORT: {host!r} is no host name or address")
    return host, int(port)


def join(host: str, port: int) -> str:
    """Returns HOST:PORT; an IPv6 host is put in brackets unless it has them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def network_of(host: str) -> str:
    """Returns the address that limits on a peer apply to: for IPv6 the /64 network, all addresses of which a client may
    use."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False).network_address)


def is_address(address: str) -> bool:
    """Returns whether `parse` accepts the address."""
    try:
        parse(address)
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Returns whether `host` means every address of this machine: it can be bound, but not dialled."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Returns whether only processes of this machine reach `host`. A name other than `localhost` is not looked up."""
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_dialable(address: str) -> bool:
    """Returns whether another process could connect to this address."""
    return is_address(address) and not is_wildcard(parse(address)[0])


def _is_name(host: str) -> bool:
    """Returns whether `host` is a name that a resolver takes, or an IPv4 address. What ends in a number can only be an
    IPv4 address (RFC 1123)."""
    labels = host.removesuffix(".").split(".")
    if labels[-1].isdecimal():
        try:
            return str(ipaddress.IPv4Address(host)) == host
        except ValueError:
            return False
    return len(host) <= _MAX_NAME_CHARS and all(_LABEL.fullmatch(label) for label in labels)


def bare_host(text: str) -> str:
    """Returns the host of `HOST`, `HOST:PORT`, `[ADDRESS]:PORT` or a bare address, in the form for comparisons."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") < 2:
        text = text.partition(":")[0]
    return text.lower().removesuffix(".")


def host_names(bound: str, others: Iterable[str] = ()) -> frozenset[str] | None:
    """Returns the hosts that an HTTP server answers to which listens on `bound`; None for any.

    On loopback it answers to the names of loopback alone, and to `others`: a browser that was lured to a name which its
    owner points at loopback says that name.
    """
    here = bare_host(bound)
    return _LOOPBACK_NAMES | {here, *map(bare_host, others)} if others or is_loopback(here) else None
