"""Checks the short texts by which clients name things. Pure."""

from __future__ import annotations

from services.core.errors import InvalidRequest

MAX_LABEL_CHARS = 128


def check_label(field: str, text: str) -> None:
    """Raises an InvalidRequest that names the field, for a text that is too long or cannot be shown in one line."""
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed")
    if not text.isprintable():
        raise InvalidRequest(field, "has characters that cannot be printed")
