"""Holds the facts of a served model that its requests are checked against. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.router.text.output.families import PLAIN_FORMS, ModelForms


@dataclass(frozen=True)
class ModelFacts:
    model_id: str
    vocab_size: int
    max_text_bytes: int
    """The most bytes, in UTF-8, of a prompt's text or of all messages and tools together, even of one that is to be
    truncated."""
    forms: ModelForms = PLAIN_FORMS
