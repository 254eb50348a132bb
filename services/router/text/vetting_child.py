"""Finds out whether a model's text side may harm whoever reads it: the program
`python -m services.router.text.vetting_child`.

Its one question names a folder (`vetting` asks it). Owns: the rules, and that they are applied where nothing depends on
this process: what takes too long or too much memory to be read ends it.
"""

from __future__ import annotations

import heapq
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from services.core.confinement import serve
from services.core.errors import ConfigError
from services.core.memory import peak_memory_bytes
from services.core.model_files import TOKENIZER
from services.router.panics import LibraryPanic, panics_are_errors
from services.router.text.chat_template import ChatTemplate
from services.router.text.growth import (
    decoder_growth,
    has_expression,
    leaves,
    normaliser_growth,
    num_added,
    pre_tokeniser_growth,
)
from services.router.text.token_bounds import text_bound
from services.router.text.tokenisation import MOST_NORMALISED_GROWTH, check_growth, load_tokenizer, read_facts

_MEMORY_BYTES = 2 << 30
_MOST_READ_BYTES = 1 << 30
"""The most memory that reading a tokenizer may take: one of 256,000 tokens takes a fifth of it."""
_MOST_TEMPLATE_BYTES = 64 << 10
_MOST_ENTRY_CHARS = 1024
"""The longest entry of a vocabulary, and the longest special token."""
_MOST_TOKEN_CHARS = 4096
"""The longest text that one token may become."""
_MOST_PARTS = 64
_MOST_ADDED = 32
_MOST_PROBE_TOKENS = 64
_NUM_LONGEST = 64
_MOST_REASON_CHARS = 1600
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")


def vet(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the router needs of the files beside the tokenizer. Raises ConfigError, or whatever the files bring
    about."""
    facts = read_facts(folder)
    if facts.template is not None:
        if (num_bytes := len(facts.template.encode())) > _MOST_TEMPLATE_BYTES:
            raise ConfigError(f"its chat template has {num_bytes} bytes; at most {_MOST_TEMPLATE_BYTES} are allowed")
        ChatTemplate(facts.template, facts.special_tokens)
    _check_lengths("a special token", facts.special_tokens.values())
    before_bytes = peak_memory_bytes()
    tokenizer = load_tokenizer(folder)
    read_bytes = peak_memory_bytes() - before_bytes
    if read_bytes > _MOST_READ_BYTES:
        raise ConfigError(
            f"reading {TOKENIZER} takes {read_bytes >> 20} MiB; at most {_MOST_READ_BYTES >> 20} are allowed"
        )
    content = json.loads(tokenizer.to_str())
    growth, longest_chars = _check_parts(content), _check_vocabulary(content)
    _probe(tokenizer)
    bound = text_bound(content)
    return {
        "template": facts.template,
        "special_tokens": facts.special_tokens,
        "vocab_size": facts.vocab_size or tokenizer.get_vocab_size(),
        "context_tokens": facts.context_tokens,
        "bound": None if bound is None else [bound.ascii_chars, bound.chars],
        "growth": growth,
        "longest_chars": longest_chars,
    }


def _check_parts(content: Mapping[str, Any]) -> float:
    """Returns how many times as long a text may become before it is cut into tokens."""
    names = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
    if (num_parts := sum(1 for name in names for _ in leaves(content.get(name)))) > _MOST_PARTS:
        raise ConfigError(f"{TOKENIZER} has {num_parts} parts; at most {_MOST_PARTS} are allowed")
    check_growth(content, pathlib.Path(TOKENIZER))
    growth = normaliser_growth(content.get("normalizer")) * pre_tokeniser_growth(content.get("pre_tokenizer"))
    if growth > MOST_NORMALISED_GROWTH:
        raise ConfigError(f"{TOKENIZER}: it makes texts {growth:.3g} times as long")
    if has_expression(content.get("decoder")):  # an answer is decoded on the event loop
        raise ConfigError(f"{TOKENIZER}: its decoder has a regular expression, which may take any time")
    if (added := num_added(content.get("post_processor"))) > _MOST_ADDED:
        raise ConfigError(f"{TOKENIZER}: its post_processor adds {added:g} tokens; at most {_MOST_ADDED} are allowed")
    return growth


def _check_vocabulary(content: Mapping[str, Any]) -> float:
    """Returns the most characters that one token may become."""
    model = content["model"]
    entries = model["vocab"] if isinstance(model["vocab"], dict) else [entry for entry, _ in model["vocab"]]
    added = [token["content"] for token in content.get("added_tokens") or ()]
    _check_lengths("a vocabulary entry", entries)
    _check_lengths("an added token", added)
    _check_lengths("an affix", [text for name in _AFFIXES if isinstance(text := model.get(name), str)])
    if (model.get("max_input_chars_per_word") or 0) > _MOST_ENTRY_CHARS:  # it takes the square of it
        raise ConfigError(f"{TOKENIZER}: its words may have more than {_MOST_ENTRY_CHARS} characters")
    longest = max((len(text) for text in (*entries, *added)), default=1)
    longest_chars = longest * decoder_growth(content.get("decoder"))
    if longest_chars > _MOST_TOKEN_CHARS:
        raise ConfigError(f"{TOKENIZER}: a token may become {longest_chars:g} characters")
    return longest_chars


def _check_lengths(what: str, texts: Iterable[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > _MOST_ENTRY_CHARS:
        raise ConfigError(f"{what} has {longest} characters; at most {_MOST_ENTRY_CHARS} are allowed")


def _probe(tokenizer: Tokenizer) -> None:
    """Tries what no description says: short texts have few tokens, and the longest tokens short texts."""
    for text in ("a", "hi"):
        for special in (False, True):
            num_tokens = len(tokenizer.encode(text, add_special_tokens=special).ids)
            if num_tokens > _MOST_PROBE_TOKENS:
                raise ConfigError(f"{TOKENIZER}: the text {text!r} has {num_tokens} tokens")
    decode = panics_are_errors(tokenizer.decode)
    ids = heapq.nlargest(_NUM_LONGEST, tokenizer.get_vocab().items(), key=lambda entry: (len(entry[0]), entry[0]))
    for _, token_id in ids:
        try:
            num_chars = len(decode([token_id], skip_special_tokens=False))
        except LibraryPanic:
            continue  # an answer with this token ends its request, and harms no other
        if num_chars > _MOST_TOKEN_CHARS:
            raise ConfigError(f"{TOKENIZER}: token {token_id} becomes {num_chars} characters")


def _answer(question: Any) -> Any:
    try:
        return panics_are_errors(vet)(pathlib.Path(question["folder"]))
    except Exception as error:  # what a worker has sent may be wrong in any way
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return {"refusal": reason[:_MOST_REASON_CHARS]}


def main() -> int:
    serve(_answer, memory_bytes=_MEMORY_BYTES, processor_s=int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
