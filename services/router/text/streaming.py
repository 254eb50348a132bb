"""Turns tokens into text as they arrive: whole characters only, and nothing that may be the beginning of a stop string.

Owns: detokenisation and stop strings of one output, and that it is taken apart (`output`) if its form says so. Never:
the request itself; the caller ends it. The text does not depend on how the tokens are divided into calls. Stop strings
are looked for in the text as the model writes it: also in what it thinks, in calls of tools, and in special tokens,
whether these are shown or not.

`tokenizers.DecodeStream` does not replace `Detokeniser`. It has only `step`, so an incomplete character at the end of
an output would be lost, and it returns nothing for 100 broken bytes in a row (tokenizers 0.23).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import ParamSpec, TypeVar

from tokenizers import Tokenizer

from services.core.ids import random_hex
from services.core.records import record
from services.router.text.output.form import PLAIN, OutputForm, OutputParser
from services.router.text.output.parts import CallPart, Parsed
from services.router.text.output.tags import without_marks

P = ParamSpec("P")
T = TypeVar("T")


class LibraryPanic(RuntimeError):
    """Replaces a panic of a library, with its message."""


def panics_are_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Makes the function raise `LibraryPanic` where a library that it calls panics.

    The tokenizers library is written in Rust. A panic there is raised as a BaseException, so it would pass every guard
    against the defects of one request, and end tasks that many requests need.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # pyo3 gives the class no importable place
                raise
            raise LibraryPanic(str(error)) from error

    return guarded


_REPLACEMENT = "\ufffd"
# Tokens may end within characters many times in a row; a character still incomplete after this many stays broken.
_MAX_HELD_TOKENS = 32
CONTEXT_TOKENS = 8
"""The most tokens before a new one that are decoded with it. Their own text is kept, so that a token costs one call of
the library and not two; when there are more, only the newest stay."""
_MOST_BEGUN_TOKENS = 3
"""The most tokens of a character that is not complete: it has at most four bytes."""


class Detokeniser:
    """Decodes tokens together with a few before them, since a token's text depends on its neighbours."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        marks: Mapping[int, str] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """`marks` are given out in place of these special tokens, which would be skipped. `before` are the tokens that
        the text continues, up to the end of a character."""
        self._decode: Callable[[list[int]], str] = panics_are_errors(
            functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        )
        self._marks = marks or {}
        self._context: list[int] = []
        """The tokens whose text was returned last."""
        self._context_text = ""
        self._held: list[int] = []
        if before:
            self._context = list(before)
            self._context_text = self._decode(self._context)

    def push(self, token_id: int) -> str:
        """Returns the text that is now certain; empty while a character is incomplete."""
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        self._held = [*self._held, token_id]  # a copy of this object has the list before
        whole = self._decode(self._context + self._held)
        text = whole[len(self._context_text) :]
        incomplete = not text or text.endswith(_REPLACEMENT)
        if incomplete and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        self._returned(whole)
        return text

    def flush(self) -> str:
        """Returns the rest of the text, with an incomplete character as U+FFFD."""
        whole = self._decode(self._context + self._held)
        text = whole[len(self._context_text) :]
        self._returned(whole)
        return text

    def _returned(self, whole: str) -> None:
        """Makes the tokens that were held a part of the context. `whole` is the text of both together."""
        if len(self._context) + len(self._held) <= CONTEXT_TOKENS:
            self._context, self._context_text = self._context + self._held, whole
        else:
            self._context, self._context_text = self._held, self._decode(self._held)
        self._held = []


def num_begun(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """Returns how many tokens at the end of a prompt begin a character that is not complete; 0 also for bytes that are
    none."""
    end = list(token_ids[-CONTEXT_TOKENS:])
    for count in range(min(_MOST_BEGUN_TOKENS, len(end)) + 1):
        if not str(tokenizer.decode(end[: len(end) - count], skip_special_tokens=False)).endswith(_REPLACEMENT):
            return count
    return 0


class StopFinder:
    """Holds back the longest end of the text that may begin a stop string; the text ends before the match."""

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self._hidden: list[tuple[int, int, str]] = []
        """Parts of the held text that are not shown, from begin to end, and what is shown instead."""

    def push(self, text: str, *, counts: bool = True, shown: str | None = None) -> tuple[str, str | None]:
        """Returns (text that is certain, the stop string that ended it or None).

        The stop string that is complete first wins; of several, the longest. Unless this text counts, none is complete
        in it, but one may begin. `shown` is shown in place of it.
        """
        if not self._stops:
            return text if shown is None else shown, None
        num_searched, text = len(self._held), self._held + text
        if shown is not None:
            self._hidden.append((num_searched, len(text), shown))
        # What was held has no stop string in it that counts, but may begin one.
        found = [(text.find(stop, max(0, num_searched + 1 - len(stop))), stop) for stop in self._stops if counts]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if matches:
            _, start, stop = min(matches)
            return self._released(text, start) + (stop if self._includes_stop else ""), stop
        held = max(_overlap(text, stop) for stop in self._stops)
        return self._released(text, len(text) - held), None

    def flush(self) -> str:
        """Returns the text that was held back, when no more text comes."""
        return self._released(self._held, len(self._held))

    def _released(self, text: str, size: int) -> str:
        """Returns the first `size` characters as they are shown, and holds the rest."""
        self._held = text[size:]
        if not self._hidden:
            return text[:size]
        parts, at = list[str](), 0
        for begin, end, shown in self._hidden:
            parts.append(text[at : max(at, min(begin, size))])
            parts.append(shown if end <= size else "")
            at = max(at, min(end, size))
        parts.append(text[at:size])
        self._hidden = [(max(0, begin - size), end - size, shown) for begin, end, shown in self._hidden if end > size]
        return "".join(parts)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


@record
class Piece:
    """Holds what some tokens add to an output."""

    text: str
    num_tokens: int
    """Tokens that belong to the output: all, or those up to the one that ended it."""
    stop: str | None = None
    """The stop string that ended it."""
    has_enough: bool = False
    """The output may end with it: it has the one call of a tool that was wanted."""
    reasoning: str = ""
    calls: Sequence[CallPart] = ()
    raw: str = field(default="", compare=False)
    """The text before it was taken apart."""

    @property
    def is_last(self) -> bool:
        return self.stop is not None or self.has_enough


class TextStream:
    """Detokenises one stream of tokens, finds stop strings in it, and takes it apart."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
        form: OutputForm = PLAIN,
        special_ids: Mapping[str, int] | None = None,
        special_texts: Mapping[int, str] | None = None,
        prompt: Sequence[int] = (),
        begins_in_prompt: bool = False,
    ) -> None:
        """`special_ids` are the ids of tags that are special tokens, `special_texts` the texts of all. Stop strings
        that are complete within the first `min_tokens` tokens do not count. The text continues `prompt`; with
        `begins_in_prompt` a character that is begun there is a part of it."""
        marks = form.marks(special_ids or {}) if skip_special_tokens else {}
        num_whole = len(prompt) - num_begun(tokenizer, prompt)
        self._detokeniser = Detokeniser(
            tokenizer, skip_special_tokens=skip_special_tokens, marks=marks, before=prompt[:num_whole]
        )
        if begins_in_prompt:
            for token_id in prompt[num_whole:]:
                self._detokeniser.push(token_id)
        self._finder = StopFinder(stops, includes_stop=includes_stop)
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._marks = marks
        self._hidden = special_texts if stops and skip_special_tokens and special_texts else {}
        """The texts of special tokens, if they are looked at and not shown."""
        self.num_reasoning_tokens = 0
        """Tokens to the end of the part that is thought, its tags included."""
        self._parser = None if form.is_plain else OutputParser(form, random_hex)

    @property
    def num_calls(self) -> int:
        """Returns how many calls of tools were found."""
        return 0 if self._parser is None else self._parser.num_calls

    def push(self, token_ids: Sequence[int], *, is_stopped: bool = False) -> Piece:
        """Returns what became certain with these tokens. With `is_stopped` the last of them is a stop token, whose text
        is looked at, and shown only if that of stops is. Do not call it after the last piece."""
        raw, parsed = "", list[Parsed]()
        for count, token_id in enumerate(token_ids, 1):
            more, stop = self._found(token_id, is_stop=is_stopped and count == len(token_ids))
            raw += more
            if self._parser is not None:
                was_thinking = self._parser.is_thinking
                parsed.append(self._parser.push(more))
                if was_thinking or self._parser.is_thinking:
                    self.num_reasoning_tokens = self._num_tokens
            if stop is not None or (self._parser is not None and self._parser.has_enough):
                if self._parser is not None:
                    parsed.append(self._parser.flush())
                return self._piece(raw, parsed, count, stop)
        return self._piece(raw, parsed, len(token_ids))

    def _found(self, token_id: int, *, is_stop: bool) -> tuple[str, str | None]:
        """Returns what the next token makes certain, and the stop string that it completes, if any."""
        self._num_tokens += 1
        if not is_stop and token_id not in self._marks and token_id not in self._hidden:
            return self._finder.push(self._detokeniser.push(token_id), counts=self._counts)
        before = self._detokeniser.flush() if is_stop else ""
        own = self._detokeniser.push(token_id)
        mark = self._marks.get(token_id)
        if is_stop:
            own += self._detokeniser.flush()
        if mark is not None or token_id in self._hidden:
            before += own.removesuffix(mark or "")
            searched, shown = self._hidden.get(token_id, ""), mark or ""
        else:
            searched, shown = own, own if self._includes_stop else ""
        certain, stop = self._finder.push(before, counts=self._counts)
        if stop is None:
            more, stop = self._finder.push(searched, counts=self._counts, shown=shown)
            certain += more
        return certain, stop

    @property
    def _counts(self) -> bool:
        """Returns whether a stop string that is complete now ends the output."""
        return self._num_tokens > self._min_tokens

    def flush(self) -> Piece:
        """Returns the end of the output: the text held back, in which a stop string may still be completed."""
        raw, stop = self._finder.push(self._detokeniser.flush(), counts=self._counts)
        if stop is None:
            raw += self._finder.flush()
        parsed = [] if self._parser is None else [self._parser.push(raw), self._parser.flush()]
        return self._piece(raw, parsed, 0, stop)

    def _piece(self, raw: str, parsed: Sequence[Parsed], num_tokens: int, stop: str | None = None) -> Piece:
        if self._parser is None:
            return Piece(raw, num_tokens, stop, raw=raw)
        total = Parsed.of(parsed)
        raw, has_enough = without_marks(raw), self._parser.has_enough
        return Piece(total.text, num_tokens, stop, has_enough, total.reasoning, total.calls, raw)
