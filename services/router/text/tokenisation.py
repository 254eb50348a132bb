"""Has the model's text side: tokenizer, chat template, and the facts of its configuration that requests must meet.

Owns: reading a model directory without loading the model. Never: weights, torch, requests. Any thread may use it once
it is made; tokenise long texts off the event loop.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.core.model_files import CHAT_TEMPLATE, CONFIG, TOKENIZER, TOKENIZER_CONFIG
from services.router.text.chat import SPECIAL_TOKENS, Message, PromptEnd, Tool
from services.router.text.chat_template import ChatTemplate
from services.router.text.control_texts import ControlTexts, unmarked
from services.router.text.output.reasoning import BEGIN as THINKING
from services.router.text.output.tags import TAGS
from services.router.text.streaming import panics_are_errors
from services.router.text.token_bounds import TextBound, text_bound
from services.router.text.token_texts import TokenTexts

_MOST_TOKENS = 1 << 30
_MOST_QUOTED_CHARS = 80
_MOST_OPENING_TOKENS = 16
"""The most tokens of a tag that ends a prompt, and of the blanks after it."""
_CUT = "6293158740"
"""Stands where a final message is continued, in what a template renders."""
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
    token_texts: TokenTexts
    template_text: str = ""
    """The chat template itself; empty if there is none."""

    def encode_text(self, text: str, most_tokens: int | None = None, *, special: bool = True) -> list[int]:
        """Returns the text's tokens, with the model's special tokens as for completion prompts, or without.

        Raises ContextLengthExceeded if there are more than `most_tokens`.
        """
        return self._encode(text, most_tokens, special=special)

    @functools.cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Returns the ids of tags of outputs that are special tokens."""
        return {text: id_ for id_, text in self.token_texts.special.items() if text in TAGS}

    def is_thinking(self, token_ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends within the part that the model thinks."""
        end = self.tokenizer.decode(list(token_ids[-_MOST_OPENING_TOKENS:]), skip_special_tokens=False)
        return str(end).rstrip().endswith(THINKING)

    def encode_messages(
        self,
        messages: Sequence[Message],
        most_tokens: int | None = None,
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = {},
        special: bool = False,
        ending: PromptEnd = PromptEnd.OPEN_ANSWER,
    ) -> list[int]:
        """Returns the tokens of the messages rendered by the chat template, which adds the special tokens itself. No
        text in a message, tool or variable becomes a control token.

        Raises InvalidRequest if the model has no template, and ContextLengthExceeded.
        """
        if self.template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        marked, marked_tools, marked_variables = self._controls.marked(messages, tools, variables)
        has_marks = marked != list(messages) or marked_tools != list(tools) or marked_variables != variables
        if ending is PromptEnd.FINAL_MESSAGE:
            marked[-1] = {**marked[-1], "content": f"{marked[-1]['content']}{_CUT} "}
        opens_answer = ending is PromptEnd.OPEN_ANSWER
        rendered = self.template.render(marked, marked_tools, marked_variables, opens_answer=opens_answer)
        if ending is PromptEnd.FINAL_MESSAGE:
            rendered = _up_to_cut(rendered)
        text = unmarked(rendered) if has_marks else rendered
        # Checked after rendering, since a template may leave out parts of the messages.
        self.check_length("messages", text, most_tokens)
        if not has_marks or not self._controls.is_forged(rendered):
            return self._encode(text, most_tokens, special=special)
        return _checked(self._controls.encode(rendered, special=special), most_tokens)

    @panics_are_errors
    def bad_sequences(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each word, as it is within a text, and after a blank where that is another token."""
        found = list[list[int]]()
        for word in words:
            alone, after_blank = (
                list(self.tokenizer.encode(blank + word.lstrip(), add_special_tokens=False).ids) for blank in ("", " ")
            )
            found += [ids for ids in (alone,) if ids]
            if after_blank and alone and after_blank[0] != alone[0] and len(after_blank) == len(alone):
                found.append(after_blank)
        return found

    @functools.cached_property
    def _controls(self) -> ControlTexts:
        return ControlTexts(self.tokenizer, self.template_text)

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
        return _checked(encoding.ids, most_tokens)


def _checked(token_ids: Sequence[int], most_tokens: int | None) -> list[int]:
    if most_tokens is not None and len(token_ids) > most_tokens:
        raise too_long(len(token_ids), most_tokens)
    return list(token_ids)


def _up_to_cut(rendered: str) -> str:
    """Returns the prompt up to the end of the last message's content: without the blanks there if the template takes
    them off."""
    before, found, after = rendered.rpartition(_CUT)
    if not found:
        raise InvalidRequest("messages", "the model's chat template does not write the last one, so it has no end")
    return before if after.startswith(" ") else before.rstrip()


def too_long(num_tokens: int, context_tokens: int) -> ContextLengthExceeded:
    asked = f"the prompt has {num_tokens}, and at most {context_tokens - 1} leave room for an output"
    return ContextLengthExceeded.of("prompt", context_tokens, asked)


@panics_are_errors
def load_model_text(directory: str | pathlib.Path) -> ModelText:
    """Reads tokenizer.json, config.json and related files. Raises a ConfigError that names what is missing or wrong."""
    folder = pathlib.Path(directory)
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(f"{folder / TOKENIZER} does not exist")
    config = _read_json(folder / CONFIG)
    if not config:
        raise ConfigError(f"{folder / CONFIG} does not exist")
    config = {**config, **config.get("text_config", {})}
    context_tokens = next((config[name] for name in _CONTEXT_NAMES if config.get(name)), None)
    if context_tokens is None:
        raise ConfigError(f"{folder / CONFIG} does not say how long a sequence may be")
    context_tokens = _size(folder / CONFIG, "context", context_tokens)
    vocab_size = _size(folder / CONFIG, "vocabulary", config["vocab_size"]) if config.get("vocab_size") else None
    template_text = _template_text(folder)
    template = ChatTemplate(template_text, _special_tokens(folder)) if template_text else None
    tokenizer = _load_tokenizer(folder)  # last, since a large one takes a second
    return ModelText(
        tokenizer=tokenizer,
        template=template,
        vocab_size=vocab_size or _size(folder / TOKENIZER, "vocabulary", tokenizer.get_vocab_size()),
        context_tokens=context_tokens,
        bound=text_bound(json.loads(tokenizer.to_str())),
        token_texts=TokenTexts(tokenizer),
        template_text=template_text,
    )


def _load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{folder / TOKENIZER} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _size(path: pathlib.Path, name: str, size: Any) -> int:
    if not (isinstance(size, int) and 0 < size <= _MOST_TOKENS):
        raise ConfigError(f"{path}: its {name} is {str(size)[:_MOST_QUOTED_CHARS]!r}")
    return size


def _template_text(folder: pathlib.Path) -> str:
    """Returns the chat template; an empty text if there is none."""
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    configured = _read_json(folder / TOKENIZER_CONFIG).get("chat_template")
    if not isinstance(configured, list):
        return configured or ""
    named = {entry["name"]: entry["template"].removesuffix("\n") for entry in configured}
    default, with_tools = named.get("default", ""), named.get("tool_use")
    # As transformers chooses: Hermes' and Mistral's older models tell of tools in a template of its own.
    return default if with_tools is None else f"{{% if tools +%}}{with_tools}{{%+ else +%}}{default}{{%+ endif %}}"


def _special_tokens(folder: pathlib.Path) -> dict[str, str]:
    special = _read_json(folder / TOKENIZER_CONFIG)
    return {name: _token_text(special[name]) for name in SPECIAL_TOKENS if special.get(name)}


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
