"""Names sets of terms and weights, each a way to place requests by the one scorer of `cluster.py`. Pure.

Owns: which terms a preset has, with which weights. Never: how a term scores (`terms.py`), or who chooses a preset for
which model (`selection.py`).

Every preset but `pressure` leaves a sequence where its prompt ran if that worker decodes too (`in_place`), and gives
less to a worker that has failed lately or has just started (`trusted`). So the terms of a prompt also look at what the
worker decodes, if it does: the sequence stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.core.errors import ConfigError
from services.router.policy.terms import (
    PolicyConfig,
    Term,
    conversation_or_prefix,
    conversation_place,
    few_requests,
    free_capacity,
    free_memory,
    in_place,
    least_recent,
    prefix_cached,
    quick_handoff,
    quick_steps,
    room_for_urgent,
    short_queue,
    small_batch,
    soon_computed,
    trusted,
)

Terms = tuple[tuple[float, Term], ...]

DEFAULT = "pressure"
"""The preset of a model for which none is chosen."""


def _preset(prefill: Terms, decode: Terms) -> PolicyConfig:
    decode = ((8.0, in_place), *decode)
    policy = PolicyConfig(prefill_terms=prefill, decode_terms=decode)
    return replace(policy, hash_prompts=policy.looks_at_prompts)


def _alike(*terms: tuple[float, Term]) -> PolicyConfig:
    """Returns a preset with the same terms for both phases."""
    return _preset(terms, terms)


PRESETS: Mapping[str, PolicyConfig] = {
    "round_robin": _alike((1.0, least_recent), (1.0, trusted)),
    "least_loaded": _alike((4.0, few_requests), (1.0, trusted)),
    "weighted": _alike((4.0, free_capacity), (1.0, trusted)),
    "token_aware": _preset(
        prefill=((4.0, soon_computed), (2.0, quick_steps), (1.0, trusted)),
        decode=((4.0, quick_steps), (1.0, free_memory), (1.0, quick_handoff), (1.0, trusted)),
    ),
    "prefix_aware": _preset(
        prefill=((4.0, prefix_cached), (1.0, short_queue), (1.0, quick_steps), (1.0, trusted)),
        decode=((4.0, prefix_cached), (1.0, free_memory), (1.0, small_batch), (1.0, trusted)),
    ),
    "sticky": _alike((4.0, conversation_place), (1.0, few_requests), (1.0, trusted)),
    "hybrid": _preset(
        prefill=((4.0, conversation_or_prefix), (1.0, soon_computed), (1.0, quick_steps), (1.0, trusted)),
        decode=((4.0, conversation_or_prefix), (1.0, quick_steps), (1.0, trusted)),
    ),
    # 0.45 prefix match - 0.25 queue delay - 0.20 KV pressure + 0.10 caller's priority. What is subtracted there is 1
    # less a term here: the order of the workers is the same.
    "kv_score": _preset(
        prefill=(
            (0.45, prefix_cached),
            (0.25, short_queue),
            (0.20, free_memory),
            (0.10, room_for_urgent),
            (1.0, trusted),
        ),
        decode=(
            (0.45, prefix_cached),
            (0.25, small_batch),
            (0.20, free_memory),
            (0.10, room_for_urgent),
            (1.0, trusted),
        ),
    ),
    DEFAULT: PolicyConfig(),
}


def preset(name: str, origin: str) -> PolicyConfig:
    """Returns the preset of that name. Raises ConfigError, which names `origin`: the flag, or the file and field."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"{origin}: {name!r} is not one of {', '.join(PRESETS)}") from None
