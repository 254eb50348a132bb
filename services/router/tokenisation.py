"""The model's text side: tokenizer, chat template, and the facts of its configuration that requests are held against.

Owns: reading a model directory without loading the model. Never: weights, torch, requests. Thread safe once made;
long texts belong off the event loop.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.core.errors import ConfigError, InvalidRequest
from services.router.chat_template import ChatTemplate

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    """Of the logits: token ids are below it."""
    context_tokens: int
    """Longest sequence the model was made for."""

    def encode_text(self, text: str) -> list[int]:
        """With the model's special tokens, as completion prompts have them."""
        return self._encode(text, special=True)

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The rendered template brings its own special tokens. Raises InvalidRequest without a template."""
        if self.template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        return self._encode(self.template.render(messages), special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)


def load_model_text(directory: str | pathlib.Path) -> ModelText:
    """Reads tokenizer.json, config.json and what goes with them. Raises ConfigError naming what is missing."""
    folder = pathlib.Path(directory)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--model: {path} does not exist")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "config.json")
    if not config:
        raise ConfigError(f"--model: {folder / 'config.json'} does not exist")
    config = {**config, **config.get("text_config", {})}
    context_tokens = next((config[name] for name in _CONTEXT_NAMES if config.get(name)), None)
    if context_tokens is None:
        raise ConfigError(f"--model: {folder / 'config.json'} does not say how long a sequence may be")
    return ModelText(
        tokenizer=tokenizer,
        template=_template(folder),
        vocab_size=int(config.get("vocab_size") or tokenizer.get_vocab_size()),
        context_tokens=int(context_tokens),
    )


def _template(folder: pathlib.Path) -> ChatTemplate | None:
    config = _read_json(folder / "tokenizer_config.json")
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return ChatTemplate(source, special)


def _token_text(token: Any) -> str:
    """Special tokens are written as text, or as a record with its properties."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--model: {path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
