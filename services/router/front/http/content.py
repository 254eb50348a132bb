"""Reads the content of a message or an item: a text, or parts that are texts."""

from __future__ import annotations

from typing import Any

from services.core.errors import InvalidRequest
from services.router.front.http.body import Body, as_list, as_record, as_text

MAX_PARTS = 256
"""The most parts of one content."""
ROLES = {"developer": "system"}
"""Roles that have another name here: OpenAI's newer ones."""
REFUSAL = "refusal"
"""The type of a part that says what an assistant would not do, and the part's field with the words."""


def as_content(value: Any, path: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Returns the content as text: a string, or the parts of these types, each on a line of its own.

    Raises InvalidRequest with the part's own field.
    """
    if isinstance(value, str):
        return as_text(value, path)
    if not isinstance(value, list):
        raise InvalidRequest(path, "is missing" if value is None else "must be a string or a list of parts")
    parts = as_list(value, path, MAX_PARTS)
    return "\n".join(_part(entry, f"{path}[{index}]", kinds) for index, entry in enumerate(parts))


def _part(entry: Any, path: str, kinds: tuple[str, ...]) -> str:
    part = Body(as_record(entry, path), path)
    kind = part.text("type")
    if kind not in kinds:
        shown = "missing" if kind is None else repr(kind[:64])
        served = ", ".join(map(repr, kinds))
        raise InvalidRequest(part.path("type"), f"is {shown}; only {served} is supported by this server")
    name = REFUSAL if kind == REFUSAL else "text"
    text = part.text(name)
    if text is None:
        raise InvalidRequest(part.path(name), "is missing")
    return text
