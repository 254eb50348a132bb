"""Has the model's text side: tokenizer, chat template, and the facts of its configuration that requests must meet.

Owns: reading a model directory without loading the model. Never: weights, torch, requests. Any thread may use it once
it is made; tokenise long texts off the event loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

from services.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.core.model_files import CHAT_TEMPLATE, CONFIG, TOKENIZER, TOKENIZER_CONFIG
from services.router.panics import panics_are_errors
from services.router.text.chat import Message, PromptEnd, Tool
from services.router.text.chat_template import ChatTemplate
from services.router.text.control_texts import ControlTexts, unmarked
from services.router.text.growth import UnknownPart, decoder_growth, normaliser_growth
from services.router.text.output.reasoning import BEGIN as THINKING
from services.router.text.output.tags import TAGS
from services.router.text.token_bounds import TextBound, text_bound
from services.router.text.token_texts import TokenTexts

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
MOST_NORMALISED_GROWTH = 1024.0
"""How many times as long a tokenizer's normaliser may make a text. A chain of those in use may reach some hundreds."""
MOST_DECODED_GROWTH = 32.0
"""How many times as long a tokenizer's decoder may make a text."""
_MOST_GROWN_CHARS = 64 << 20
"""The most characters that a text may become before it is cut into tokens; each takes some 17 bytes then."""
_MOST_TOKENS = 1 << 30
_MOST_QUOTED_CHARS = 80
_MOST_OPENING_TOKENS = 16
"""The most tokens of a tag that ends a prompt, and of the blanks after it."""
_CUT = "6293158740"
"""Stands where a final message is continued, in what a template renders."""
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


class MessageTemplate(Protocol):
    """Renders chats for one model: a ChatTemplate, or a TemplateProcess. Any thread may use it, and must expect to
    wait."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opens_answer: bool = True) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ModelText:
    tokenizer: Tokenizer
    template: MessageTemplate | None
    vocab_size: int
    """Number of the logits: token ids are below it."""
    context_tokens: int
    """Tokens of the longest sequence that the model was made for."""
    bound: TextBound | None
    """How many characters one token may stand for at most; None if any number."""
    token_texts: TokenTexts
    growth: float | None = None
    """How many times as long a text may become before it is cut into tokens. None: the tokenizer is the router's own,
    and is trusted."""
    template_text: str = ""
    """The chat template itself; empty if there is none."""

    @property
    def is_trusted(self) -> bool:
        """Returns whether a short text is surely tokenised in no time: an expression of a tokenizer may take any."""
        return self.growth is None

    def close(self) -> None:
        """Ends what renders its chats. It may block for moments."""
        if self.template is not None:
            self.template.close()

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
        special: bool = False,
        ending: PromptEnd = PromptEnd.OPEN_ANSWER,
    ) -> list[int]:
        """Returns the tokens of the messages rendered by the chat template, which adds the special tokens itself. No
        text in a message or tool becomes a control token.

        Raises InvalidRequest if the model has no template, and ContextLengthExceeded.
        """
        if self.template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        marked, marked_tools = self._controls.marked(messages, tools)
        has_marks = marked != list(messages) or marked_tools != list(tools)
        if ending is PromptEnd.FINAL_MESSAGE:
            marked[-1] = {**marked[-1], "content": f"{marked[-1]['content']}{_CUT} "}
        rendered = self.template.render(marked, marked_tools, opens_answer=ending is PromptEnd.OPEN_ANSWER)
        if ending is PromptEnd.FINAL_MESSAGE:
            rendered = _up_to_cut(rendered)
        text = unmarked(rendered) if has_marks else rendered
        # Checked after rendering, since a template may leave out parts of the messages.
        self.check_length("messages", text, most_tokens)
        if not has_marks or not self._controls.is_forged(rendered):
            return self._encode(text, most_tokens, special=special)
        self._check_growth(text)
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

    def _check_growth(self, text: str) -> None:
        if self.growth is not None and len(text) * self.growth > _MOST_GROWN_CHARS:
            raise InvalidRequest("prompt", f"its {len(text)} characters may become too many in this model's tokenizer")

    @panics_are_errors
    def _encode(self, text: str, most_tokens: int | None, *, special: bool) -> list[int]:
        self._check_growth(text)
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


@dataclass(frozen=True)
class TextFacts:
    """Keeps what the files beside a tokenizer say."""

    vocab_size: int | None
    """None if they do not say, and the tokenizer's own counts."""
    context_tokens: int
    template: str | None
    special_tokens: dict[str, str]


@panics_are_errors
def load_model_text(directory: str | pathlib.Path) -> ModelText:
    """Reads tokenizer.json, config.json and related files. Raises a ConfigError that names what is missing.

    Call it for the router's own model; a model that a worker brings is read by `vetting`.
    """
    folder = pathlib.Path(directory)
    facts = read_facts(folder)
    template = ChatTemplate(facts.template, facts.special_tokens) if facts.template else None
    tokenizer = load_tokenizer(folder)  # last, since a large one takes a second
    content = json.loads(tokenizer.to_str())
    with contextlib.suppress(UnknownPart):  # the router's own tokenizer may be newer than what is known here
        check_growth(content, folder / TOKENIZER)
    return ModelText(
        tokenizer=tokenizer,
        template=template,
        vocab_size=facts.vocab_size or _size(folder / TOKENIZER, "vocabulary", tokenizer.get_vocab_size()),
        context_tokens=facts.context_tokens,
        bound=text_bound(content),
        token_texts=TokenTexts(tokenizer),
        template_text=facts.template or "",
    )


def read_facts(folder: pathlib.Path) -> TextFacts:
    """Reads the files beside the tokenizer, which must be there too. Raises a ConfigError that names what is missing
    or wrong."""
    if not (folder / TOKENIZER).is_file():
        raise ConfigError(f"{folder / TOKENIZER} does not exist")
    config = _read_json(folder / CONFIG)
    if not config:
        raise ConfigError(f"{folder / CONFIG} does not exist")
    config = {**config, **config.get("text_config", {})}
    context_tokens = next((config[name] for name in _CONTEXT_NAMES if config.get(name)), None)
    if context_tokens is None:
        raise ConfigError(f"{folder / CONFIG} does not say how long a sequence may be")
    vocab_size = config.get("vocab_size") or None
    special = _read_json(folder / TOKENIZER_CONFIG)
    return TextFacts(
        vocab_size=None if vocab_size is None else _size(folder / CONFIG, "vocabulary", vocab_size),
        context_tokens=_size(folder / CONFIG, "context", context_tokens),
        template=_template(folder, special.get("chat_template")),
        special_tokens={name: _token_text(special[name]) for name in _SPECIAL_TOKENS if special.get(name)},
    )


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Reads the tokenizer itself. Raises ConfigError if it is none."""
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"{folder / TOKENIZER} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_growth(content: Mapping[str, Any], path: pathlib.Path) -> None:
    """Raises ConfigError if a tokenizer.json's content says that it makes texts many times as long, UnknownPart if it
    has parts that are not known."""
    for part, growth, most in (
        ("normalizer", normaliser_growth, MOST_NORMALISED_GROWTH),
        ("decoder", decoder_growth, MOST_DECODED_GROWTH),
    ):
        if (times := growth(content.get(part))) > most:
            raise ConfigError(f"{path}: its {part} makes texts {times:.3g} times as long")


def _size(path: pathlib.Path, name: str, size: Any) -> int:
    if not (isinstance(size, int) and 0 < size <= _MOST_TOKENS):
        raise ConfigError(f"{path}: its {name} is {str(size)[:_MOST_QUOTED_CHARS]!r}")
    return size


def _template(folder: pathlib.Path, configured: Any) -> str | None:
    path = folder / CHAT_TEMPLATE
    source = path.read_text(encoding="utf-8") if path.is_file() else configured
    if isinstance(source, list):  # several templates, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return source or None


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
