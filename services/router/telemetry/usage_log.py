"""Writes what requests were charged to a file, to bill by: a line for each request that ended.

Owns: what a line says. Never: how it comes to the file (`json_lines.py`), what is charged, or reading (`baton usage`
does).
"""

from __future__ import annotations

from typing import Any

from services.router.telemetry.json_lines import JsonLines
from services.router.telemetry.usage import RequestUsage


class UsageLog:
    """Is told of requests by `ended`, on the event loop."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def ended(self, usage: RequestUsage) -> None:
        """Notes a request that has ended. It waits for nothing."""
        self._lines.put(charged(usage))


def charged(usage: RequestUsage) -> dict[str, Any]:
    """Returns the fields that say what a request is charged."""
    tokens = usage.tokens
    return {
        "tenant": usage.tenant,
        "model": usage.model,
        "request_id": usage.request_id,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "output_tokens": tokens.output,
        "cost": usage.cost,
        "outcome": usage.outcome,
    }
