"""Compiles constraints over a model's vocabulary, and matches output against them, by llguidance (ADR 0020).

Owns: what is asked of the library, and its limits. Never: where that runs (`grammar_process` vets in a child first,
`constraints` keeps what was compiled), or the wire.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from services.core.errors import InvalidRequest, UnsupportedModel
from services.core.model_files import TOKENIZER
from services.core.printable import printable
from services.engine.schedule.constraint import Bits, forbid, num_words
from services.rpc.json_schemas import JSON_OPTIONS, as_compiled

FIELD = "constraint"
_JSON_OPTIONS: Any = JSON_OPTIONS
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=40_000,
    step_lexer_fuel=50_000,
    step_max_items=2_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Much less than the library's own: no schema in use was found to need more, and a mask takes 20 ms at most, where one
of `(a{1000}){1000}` takes two seconds by the library's limits (ADR 0020 has the measurements)."""
_MOST_WORDS_CHARS = 300


class Vocabulary:
    """Keeps the bytes of a model's tokens, in the form that masks are computed with."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Reads the folder's tokenizer.json: half a second of processor time for 50,000 tokens, in which the library
        holds the interpreter's lock. Raises UnsupportedModel, which says why, if the tokenizer cannot be used."""
        path = folder / TOKENIZER
        if not path.is_file():
            raise UnsupportedModel(f"this model has no constraints: its directory has no {TOKENIZER}")
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        try:
            # Without a token that ends a sequence the library takes one of its own choice, which nothing allows then.
            eos = list(self.eos_token_ids) or None
            self.tokenizer = LLTokenizer(path.read_text(), n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise UnsupportedModel(f"this model has no constraints: {_words(f'{TOKENIZER}: {error}')}") from error
        if self.tokenizer.vocab_size != vocab_size:
            difference = f"{TOKENIZER} has {self.tokenizer.vocab_size} tokens, and the model {vocab_size}"
            raise UnsupportedModel(f"this model has no constraints: {difference}")
        self.never = tuple(self.tokenizer.eos_tokens)
        """Tokens that end an output in the library's view; `TokenConstraint` leaves these to the engine."""


class Matcher:
    """Is a `TokenConstraint`: a compiled grammar and what it has taken."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher

    def copy(self) -> Matcher:
        """Returns a matcher that has taken the same, and goes its own way from there. It takes 20 microseconds."""
        return Matcher(self._vocabulary, self._matcher.deep_copy())

    def take(self, token_ids: Sequence[int]) -> None:
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise InvalidRequest(FIELD, f"does not take the output: {_words(self._matcher.get_error())}")

    def fill(self, bits: Bits) -> bool:
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, num_words(self._vocabulary.vocab_size) * 4)
        if self._matcher.is_error():
            raise InvalidRequest(FIELD, f"is too complex: {_words(self._matcher.get_error())}")
        forbid(bits, self._vocabulary.never)
        return bool(self._matcher.is_accepting())


def grammar_of(kind: str, text: str) -> str:
    """Returns llguidance's form of a constraint. `kind`: "json_schema", "regex" or "grammar".

    It is quick but for long grammars in GBNF, which are translated by Python. Raises ValueError if the text is none.
    """
    match kind:
        case "json_schema":
            schema = json.dumps(as_compiled(json.loads(text)))
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case _:
            return LLMatcher.grammar_from_lark(any_to_lark(text))


def compile_grammar(vocabulary: Vocabulary, grammar: str) -> Matcher:
    """Returns a matcher that has taken nothing. The interpreter's lock is free meanwhile.

    Raises InvalidRequest, with the library's words, if the grammar is invalid or exceeds the limits.
    """
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise InvalidRequest(FIELD, f"cannot be compiled: {_words(matcher.get_error())}")
    return Matcher(vocabulary, matcher)


def _words(text: str) -> str:
    """Returns what the library says, on one line and bounded: it quotes the constraint."""
    lines = (line for line in text.splitlines() if line.strip() and line != "<non-verbose/>")
    return printable(" ".join(" ".join(lines).split())[:_MOST_WORDS_CHARS])
