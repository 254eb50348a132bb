"""Makes links into the user interface of a Jaeger at a given address. The module is pure.

Owns: which addresses are accepted, and the form of the links. Never: asks Jaeger anything.
"""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

JAEGER_HELP = "address of Jaeger's user interface, such as http://localhost:16686, to which links to traces lead"
A_WEB_ADDRESS = "must be an http or https address without user, query and fragment, such as http://localhost:16686"

_PLAIN = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~%+-]*)*")


def is_web_address(text: str) -> bool:
    """Returns whether `text` is an http or https URL with a host, and at most a port and a path beside it."""
    if _PLAIN.fullmatch(text) is None:
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0  # reading the port raises if it is no number up to 65535
    except ValueError:
        return False


def search_link(base: str, service: str) -> str:
    """Returns the link to a search for a service's newest traces."""
    return f"{base.rstrip('/')}/search?service={quote(service, safe='')}"


def trace_link(base: str, trace_id: str) -> str:
    """Returns the link to one trace."""
    return f"{base.rstrip('/')}/trace/{quote(trace_id, safe='')}"


def comparison_link(base: str, trace_id: str, other_id: str) -> str:
    """Returns the link to the comparison of two traces."""
    return f"{trace_link(base, trace_id)}...{quote(other_id, safe='')}"
