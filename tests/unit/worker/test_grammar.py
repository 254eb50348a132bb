"""Tests matchers over a small vocabulary: what they allow, where the output may end, and what they refuse."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.core.errors import InvalidRequest, UnsupportedModel
from services.engine.schedule.constraint import num_words
from services.worker.constraints import any_of
from services.worker.grammar import Matcher, Vocabulary, compile_grammar, grammar_of
from tests.support.text_model import write_model

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no" tail?\ntail ::= " and " [a-z]+'
LARK = 'start: "yes" | "no" tail?\ntail: " and " /[a-z]+/'


class Model:
    def __init__(self, folder: Path) -> None:
        write_model(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocabulary = Vocabulary(folder, self.tokenizer.get_vocab_size() + 20, [EOS])

    def compile(self, kind: str, text: str) -> Matcher:
        return compile_grammar(self.vocabulary, grammar_of(kind, text))

    def ids(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def allowed(self, matcher: Matcher) -> tuple[set[int], bool]:
        bits = np.zeros(num_words(self.vocabulary.vocab_size), np.int32)
        may_end = matcher.fill(bits)
        return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()), may_end

    def takes(self, matcher: Matcher, text: str) -> bool:
        """Returns whether the text is allowed token for token, and may end."""
        for token_id in self.ids(text):
            if token_id not in self.allowed(matcher)[0]:
                return False
            matcher.take([token_id])
        return self.allowed(matcher)[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("kind", "constraint", "good", "bad"),
    [
        ("json_schema", json.dumps(SCHEMA), '{"name": "Jürgen \\"x\\"", "age": -12}', '{"name": "x"}'),
        ("json_schema", json.dumps(SCHEMA), '{\n  "name" : "",\n  "age": 0\n}', '{"name": "", "age": 0.5}'),
        ("json_schema", '{"type": "object"}', '{"a": [1.5e3, null, {"b": true}]}', "[1]"),
        ("regex", "[a-c]{2,3}x?", "abcx", "abcdx"),
        ("regex", any_of(["a.b", "a b|c", "(é)\n"]), "a b|c", "axb"),
        ("regex", any_of(["a.b", "a b|c", "(é)\n"]), "(é)\n", "a b"),
        ("grammar", GBNF, "no and onward", "no and "),
        ("grammar", LARK, "no and onward", "maybe"),
    ],
)
def test_what_is_allowed(model: Model, kind: str, constraint: str, good: str, bad: str) -> None:
    compiled = model.compile(kind, constraint)
    assert model.takes(compiled.copy(), good)
    assert not model.takes(compiled.copy(), bad)


def test_a_document_that_is_complete_leaves_nothing(model: Model) -> None:
    matcher = model.compile("regex", "ab")
    matcher.take(model.ids("ab"))
    assert model.allowed(matcher) == (set(), True), "the tokens that end it are the engine's to allow"
    with pytest.raises(InvalidRequest, match="does not take the output"):
        matcher.take(model.ids("c"))


def test_special_tokens_are_no_text(model: Model) -> None:
    allowed, may_end = model.allowed(model.compile("regex", "(?s:.*)"))
    assert may_end is True
    assert not allowed & {0, 1, EOS}
    assert max(allowed) < model.tokenizer.get_vocab_size(), "nor are the numbers that no token has"


def test_a_matcher_that_takes_an_output_anew_says_the_same(model: Model) -> None:
    compiled = model.compile("json_schema", '{"type": "object"}')
    walked, output = compiled.copy(), []
    choose = random.Random(1)
    for _ in range(60):
        allowed = model.allowed(walked)[0]
        anew = compiled.copy()
        anew.take(output)
        assert model.allowed(anew) == model.allowed(walked)
        if not allowed:
            break
        output.append(choose.choice(sorted(allowed)))
        walked.take(output[-1:])


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"type": "string", "pattern": "("}', "regex"),
        ("json_schema", '{"type": "object", "notAKeyword": 1, "not": {"type": "string"}}', "not"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "none"),
        ("json_schema", '{"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}', "complex|compiled"),
        ("regex", "a(?=b)", "look"),
        ("regex", "(" * 5000 + "a" + ")" * 5000, "invalid regex"),
        ("grammar", "start: " + "(" * 8000 + '"a"' + ")" * 8000, "nested"),
        ("grammar", "start: missing", "missing"),
        ("regex", "|".join(f"{number:06}" * 8 for number in range(20_000)), "too big"),
    ],
)
def test_what_is_refused(model: Model, kind: str, text: str, words: str) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=words) as caught:
        model.allowed(model.compile(kind, text))
    assert len(str(caught.value)) < 400


def test_models_without_a_usable_tokenizer(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        Vocabulary(tmp_path, 300, [EOS])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: "):
        Vocabulary(tmp_path, 300, [EOS])
    write_model(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Vocabulary(tmp_path, 100, [EOS])


def test_a_model_without_a_token_that_ends(tmp_path: Path) -> None:
    write_model(tmp_path)
    endless: Any = Vocabulary(tmp_path, 300, [])
    matcher = compile_grammar(endless, grammar_of("regex", "a*"))
    bits = np.zeros(num_words(300), np.int32)
    assert matcher.fill(bits)
    unpacked = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert not set(unpacked.tolist()) & {0, 1, EOS}
