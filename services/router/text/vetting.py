"""Reads the text side of a model that a worker brought, after a child process has found it harmless.

Owns: what of it comes into this process: the tokenizer, and few numbers and short texts. Never: the rules, which are
the child's (`vetting_child`).
"""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

from services.core.confined_process import ConfinedFailure, ConfinedProcess
from services.core.errors import ConfigError
from services.router.panics import panics_are_errors
from services.router.text.template_process import TemplateProcess
from services.router.text.token_bounds import TextBound
from services.router.text.token_texts import TokenTexts
from services.router.text.tokenisation import ModelText, load_tokenizer

VETTING_S = 30.0
"""The most seconds that vetting may take. A tokenizer of 256,000 tokens takes 1.5 s of a processor's time, and an
interpreter some tenths to start."""
_PROCESSOR_S = 10
_CHILD = "services.router.text.vetting_child"
_MOST_VERDICT_BYTES = 1 << 20


async def vetted_model_text(folder: pathlib.Path, *, within_s: float = VETTING_S) -> ModelText:
    """Returns what the folder holds. Raises ConfigError with the reason if the router should not read it.

    If it is cancelled, the child process ends at once.
    """
    process = ConfinedProcess(_CHILD, str(_PROCESSOR_S))
    try:
        verdict = await asyncio.to_thread(_verdict, process, folder, within_s)
    finally:
        process.kill()
    return await asyncio.to_thread(_load, folder, verdict)


def _verdict(process: ConfinedProcess, folder: pathlib.Path, within_s: float) -> Any:
    try:
        verdict = process.ask({"folder": str(folder)}, within_s=within_s, most_bytes=_MOST_VERDICT_BYTES)
    except ConfinedFailure as failure:
        raise ConfigError(f"reading it {failure}") from None
    finally:
        process.end()
    if "refusal" in verdict:
        raise ConfigError(str(verdict["refusal"]))
    return verdict


@panics_are_errors
def _load(folder: pathlib.Path, verdict: Any) -> ModelText:
    tokenizer = load_tokenizer(folder)
    template, bound = verdict["template"], verdict["bound"]
    return ModelText(
        tokenizer=tokenizer,
        template=TemplateProcess(template, verdict["special_tokens"]) if template else None,
        vocab_size=verdict["vocab_size"],
        context_tokens=verdict["context_tokens"],
        bound=TextBound(*bound) if bound else None,
        token_texts=TokenTexts(tokenizer, verdict["longest_chars"]),
        growth=verdict["growth"],
        template_text=template or "",
    )
