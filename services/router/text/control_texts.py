"""Keeps texts of control tokens that clients write from becoming control tokens: only a chat template's own do.

Control tokens are a tokenizer's special tokens, and other added tokens that the chat template writes (not those that
are tags of outputs). Where what a client says could make the text of one, alone or together with what the template
writes beside it, it is marked before the template is rendered, in a way that filters keep: digits within and beside
it. Texts of control tokens that are whole in the rendered prompt are the template's then. If the marks have broken any,
the template's are written as aliases, and the prompt is encoded by a twin of the tokenizer that knows the aliases and
no control token. So a prompt is always encoded as a whole, with the same rules, and has the usual ids wherever clients
have written no such text.

The twin has the tokenizer's own model, so it takes no memory. Any thread may use all of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.core.errors import InvalidRequest
from services.router.text.chat import Message, Tool, Variables
from services.router.text.output.tags import TAGS
from services.router.text.streaming import panics_are_errors

# They are removed before a prompt is encoded, so whoever writes them gains nothing. No end of one begins one.
_WITHIN, _BESIDE = "4071936528", "5182047639"
_LABELS = ("role", "type")
"""Fields of messages that are no client's text: the router has checked them."""
_JSON = ("arguments", "parameters")
_TAKEN_OUT = re.compile(r"""\b(?:replace|split)\(\s*(?:'([^']+)'|"([^"]+)")""")
"""Calls of templates by which they take a text out of a content, such as `content.replace('/think', '')`."""


class ControlTexts:
    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """`template` is the text of the chat template."""
        self._tokenizer = tokenizer
        self._added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._controls = {
            token.content: id_ for id_, token in self._added.items() if token.content and _is_control(token, template)
        }
        longest_first = sorted(self._controls, key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest_first)) or "(?!)"
        first = "".join(sorted({re.escape(text[0]) for text in longest_first})) or " "
        # The set of first characters comes first, since looking for each of some hundred texts is slow.
        self._written = re.compile(f"(?=[{first}])(?:{any_of})", re.IGNORECASE)
        self._whole = re.compile(f"(?=[{first}])(?:{any_of})(?!{_WITHIN})")
        self._first = re.compile(f"[{first}]")
        found = ((single or double).replace(r"\n", "\n") for single, double in _TAKEN_OUT.findall(template))
        self._taken_out = tuple(found)
        """Texts that the template takes out, in its order."""
        folded = [text.lower() for text in longest_first]
        self._beginnings = {text[:size] for text in folded for size in range(1, len(text))}
        self._ends = {text[size:] for text in folded for size in range(1, len(text))}
        self._inner = "\0".join(folded)
        self._longest = max(map(len, folded), default=0)

    def marked(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: Variables
    ) -> tuple[list[Message], list[Tool], Variables]:
        """Returns the messages, tools and variables with marks where they could make the text of a control token.
        Raises InvalidRequest for JSON that is nested too deeply to be looked through."""
        try:
            return (
                [self._marked(message) for message in messages],
                [self._marked(tool) for tool in tools],
                {name: self._marked(value) for name, value in variables.items()},
            )
        except RecursionError:
            raise InvalidRequest("messages", "they, or the tools, have JSON that is nested too deeply") from None

    def is_forged(self, rendered: str) -> bool:
        """Returns whether a rendered prompt, without its marks, has texts of control tokens that the template has not
        written."""
        return self._whole.findall(rendered) != self._whole.findall(unmarked(rendered))

    @panics_are_errors
    def encode(self, rendered: str, *, special: bool) -> list[int]:
        """Returns the tokens of a prompt that is forged: what the template has not written stays text."""
        twin, aliases, ids = self._twin
        aliased = unmarked(self._whole.sub(lambda found: aliases[found[0]], rendered))
        (encoding,) = twin.encode_batch_fast([aliased], add_special_tokens=special)
        return [ids.get(token_id, token_id) for token_id in encoding.ids]

    @functools.cached_property
    def _twin(self) -> tuple[Tokenizer, Mapping[str, str], Mapping[int, int]]:
        """Returns the twin, the aliases of control tokens, and the ids of those of its tokens that have others."""
        twin = Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(twin, part, value)
        secret = secrets.token_hex(8)  # clients do not know it, so they cannot write an alias
        aliases = {text: f"<{secret}-{token_id}>" for text, token_id in self._controls.items()}
        in_order = [token for _, token in sorted(self._added.items())]
        for is_control, group in itertools.groupby(in_order, lambda token: token.content in self._controls):
            (twin.add_special_tokens if is_control else twin.add_tokens)([_like(each, each.content) for each in group])
        twin.add_tokens([_like(self._added[self._controls[text]], alias) for text, alias in aliases.items()])
        twin.encode_special_tokens = True
        ids = {token.content: token_id for token_id, token in self._added.items()}
        ids |= {alias: self._controls[text] for text, alias in aliases.items()}
        theirs = {own_id: id for text, id in ids.items() if (own_id := twin.token_to_id(text)) is not None}
        return twin, aliases, theirs

    def _marked(self, value: Any) -> Any:
        match value:
            case str():
                return self._beside(value, self._within(value))
            case Mapping():
                return {name: self._field(name, each) for name, each in value.items()}
            case list():
                return [self._marked(each) for each in value]
        return value

    def _field(self, name: str, value: Any) -> Any:
        if name in _LABELS:
            return value
        return self._in_json(value) if name in _JSON else self._marked(value)

    def _within(self, text: str) -> str:
        marked = self._written.sub(lambda found: _WITHIN.join(found[0]) + _WITHIN, text)
        left = functools.reduce(lambda rest, taken: rest.replace(taken, ""), self._taken_out, text)
        # What is taken out may stand within the text of a control token, so that nobody finds it before.
        if left != text and self._written.search(left):
            marked = self._first.sub(lambda found: found[0] + _WITHIN, marked)
        return marked

    def _beside(self, text: str, marked: str) -> str:
        """Marks the ends of a text that could be a part of a control token's."""
        sizes = range(1, min(self._longest, len(text)) + 1)
        if any(text[:size].lower() in self._ends for size in sizes) or (text and text.lower() in self._inner):
            marked = _BESIDE + marked
        return marked + _BESIDE if any(text[-size:].lower() in self._beginnings for size in sizes) else marked

    def _in_json(self, text: str) -> str:
        """Marks what is within the names and strings of a JSON object, which escapes may hide. Templates know some of
        them, and write brackets and quotes beside them, so their ends are not marked. Of a value that is no object,
        templates are given the text itself."""
        value = None
        with contextlib.suppress(ValueError):
            value = json.loads(text)
        if not isinstance(value, dict):
            return str(self._marked(text))
        marked = self._in_value(value)
        return text if marked == value else json.dumps(marked, ensure_ascii=False)

    def _in_value(self, value: Any) -> Any:
        match value:
            case str():
                return self._within(value)
            case dict():
                return {self._within(name): self._in_value(each) for name, each in value.items()}
            case list():
                return [self._in_value(each) for each in value]
        return value


def unmarked(rendered: str) -> str:
    return rendered.replace(_WITHIN, "").replace(_BESIDE, "")


def _is_control(token: AddedToken, template: str) -> bool:
    if token.special:
        return True
    return token.content not in TAGS and bool(token.content.strip()) and token.content in template


def _like(token: AddedToken, text: str) -> AddedToken:
    return AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )
