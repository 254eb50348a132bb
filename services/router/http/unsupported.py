"""Fields of OpenAI's API, and of vLLM's additions, that change an answer and that Baton does not have.

Ignoring one of them would give an answer that was not asked for, so they are refused by name; values that ask for
nothing are accepted, since clients send them. Fields that are not listed, here or among the supported, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.core.errors import InvalidRequest
from services.router.http.body import Body

Neutral = Mapping[str, tuple[Any, ...]]
"""Field to the values, beside null, that ask for nothing."""

BOTH: Neutral = {
    "n": (1,),
    "best_of": (0, 1),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "kv_transfer_params": (),
}
COMPLETIONS: Neutral = {**BOTH, "suffix": ("",), "prompt_embeds": (), "add_special_tokens": (True,)}
CHAT: Neutral = {
    **BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


def refuse(body: Body, fields: Neutral) -> None:
    """Raises InvalidRequest naming the first field that asks for what Baton does not have."""
    for name, neutral in fields.items():
        value = body.take(name)
        if value is not None and not any(_same(value, other) for other in neutral):
            raise InvalidRequest(body.path(name), "is not supported by this server")


def _same(value: Any, other: Any) -> bool:
    """As JSON: true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
