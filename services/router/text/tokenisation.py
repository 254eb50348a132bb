"""Has the model's text side: tokenizer, chat template, and the facts of its configuration that requests must meet.

Owns: reading a model directory without loading the model. Never: weights, torch, requests. Any thread may use it once
it is made; tokenise long texts off the event loop.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.core.model_files import CHAT_TEMPLATE, CONFIG, TOKENIZER, TOKENIZER_CONFIG
from services.router.panics import panics_are_errors
from services.router.text.chat_template import ChatTemplate
from services.router.text.token_bounds import TextBound, growth, text_bound

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MOST_GROWTH = 32.0
"""How many times as long a tokenizer's normaliser or decoder may make a text."""
_MOST_TOKENS = 1 << 30
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int
    """Number of the logits: token ids are below it."""
    context_tokens: int
    """Tokens of the longest sequence that the model was made for."""
    bound: TextBound | None
    """How many characters one token may stand for at most; None if any number."""

    def encode_text(self, text: str, most_tokens: int | None = None) -> list[int]:
        """Returns the text's tokens with the model's special tokens, as for completion prompts.

        Raises ContextLengthExceeded if there are more than `most_tokens`.
        """
        return self._encode(text, most_tokens, special=True)

    def encode_messages(self, messages: Sequence[Mapping[str, str]], most_tokens: int | None = None) -> list[int]:
        """Returns the tokens of the messages rendered by the chat template, which adds the special tokens itself.

        Raises InvalidRequest if the model has no template, and ContextLengthExceeded.
        """
        if self.template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        rendered = self.template.render(messages)
        # Checked after rendering, since a template may leave out parts of the messages.
        self.check_length("messages", rendered, most_tokens)
        return self._encode(rendered, most_tokens, special=False)

    def check_length(self, field: str, text: str, most_tokens: int | None) -> None:
        """Raises ContextLengthExceeded if the text's length shows that it has more than `most_tokens` tokens."""
        if self.bound is None or most_tokens is None:
            return
        fewest_tokens = self.bound.fewest_tokens(text)
        if fewest_tokens > most_tokens:
            asked = f"the prompt's {len(text)} characters are at least {fewest_tokens}"
            raise ContextLengthExceeded.of(field, most_tokens, asked)

    @panics_are_errors
    def _encode(self, text: str, most_tokens: int | None, *, special: bool) -> list[int]:
        # Encoded as a batch, since only that releases the interpreter lock meanwhile.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        if most_tokens is not None and len(encoding) > most_tokens:
            raise too_long(len(encoding), most_tokens)
        return list(encoding.ids)


def too_long(num_tokens: int, context_tokens: int) -> ContextLengthExceeded:
    asked = f"the prompt has {num_tokens}, and at most {context_tokens - 1} leave room for an output"
    return ContextLengthExceeded.of("prompt", context_tokens, asked)


@panics_are_errors
def load_model_text(directory: str | pathlib.Path) -> ModelText:
    """Reads tokenizer.json, config.json and related files. Raises a ConfigError that names what is missing."""
    folder = pathlib.Path(directory)
    path = folder / TOKENIZER
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    config = _read_json(folder / CONFIG)
    if not config:
        raise ConfigError(f"{folder / CONFIG} does not exist")
    config = {**config, **config.get("text_config", {})}
    context_tokens = next((config[name] for name in _CONTEXT_NAMES if config.get(name)), None)
    if context_tokens is None:
        raise ConfigError(f"{folder / CONFIG} does not say how long a sequence may be")
    template = _template(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))  # last, since a large one takes a second
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{path} is no tokenizer: {error}") from error
    content = json.loads(tokenizer.to_str())
    for part in ("normalizer", "decoder"):
        if (times := growth(content.get(part))) > _MOST_GROWTH:
            raise ConfigError(f"{path}: its {part} makes texts {times:.3g} times as long")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = config.get("vocab_size") or tokenizer.get_vocab_size()
    for name, size in (("vocabulary", vocab_size), ("context", context_tokens)):
        if not (isinstance(size, int) and 0 < size <= _MOST_TOKENS):
            raise ConfigError(f"{folder / CONFIG}: its {name} is {size!r}")
    return ModelText(
        tokenizer=tokenizer,
        template=template,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        bound=text_bound(content),
    )


def _template(folder: pathlib.Path) -> ChatTemplate | None:
    config = _read_json(folder / TOKENIZER_CONFIG)
    path = folder / CHAT_TEMPLATE
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        return None
    special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return ChatTemplate(source, special)


def _token_text(token: Any) -> str:
    """Returns the text of a special token, which is written as text, or as a record with its properties."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
