"""Tests the grammars of calls with the library that workers compile them with: what they take, and what not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from baton.v1 import types_pb2
from services.router.text.output.families import TOOL_FAMILIES
from services.router.text.output.form import OutputForm, OutputParser
from services.router.text.output.grammar import any_answer, json_answer, output_grammar
from services.router.text.output.tags import TAGS
from services.rpc.constraints import check_constraint
from services.worker.grammar import grammar_of
from tests.support.text_model import byte_tokenizer

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": 'the city: a ::= "b" ::= c\nstart: x'}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {},
}
WEATHER, NOW = '{"name": "get_weather", "arguments": {"city": "Rome"}}', '{"name": "now", "arguments": {}}'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Rome"}}'


def tokenizer(*special: str) -> Tokenizer:
    made = byte_tokenizer()
    made.add_special_tokens(list(special))
    return made


PLAIN, SPECIAL = tokenizer(), tokenizer(*TAGS)


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def matched(form: OutputForm, output: str, made: Tokenizer, schemas: Any = SCHEMAS, **how: Any) -> str:
    """Returns what a constraint says of an output: "whole", "begun", or "refused" with all after that."""
    special = {tag: made.token_to_id(tag) for tag in TAGS if made.token_to_id(tag) is not None}
    grammar = output_grammar(form, schemas, special, **how)
    check_constraint(types_pb2.Constraint(grammar=grammar))
    library = LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=[2])
    matcher = LLMatcher(library, grammar_of("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = made.encode(output, add_special_tokens=False).ids
    if matcher.try_consume_tokens(ids) < len(ids):
        return "refused"
    return "whole" if matcher.is_accepting() else "begun"


def form(family: str, reasoning: str = "none", *, is_thinking: bool = False, only_one: bool = False) -> OutputForm:
    return OutputForm(reasoning, is_thinking, TOOL_FAMILIES[family], frozenset(SCHEMAS), only_one)


REQUIRED = [
    (
        form("hermes"),
        [hermes(WEATHER), hermes(WEATHER, NOW)],
        ["Hm.", "<think>\n", hermes(WEATHER.replace("city", "c"))],
    ),
    (form("hermes", only_one=True), [hermes(WEATHER)], [hermes(WEATHER, NOW)]),
    (
        form("hermes", "think"),
        [hermes(NOW), f"<think>\nHm <tool.\n</think>\n\n{hermes(NOW)}"],
        ["Hm.", "<think>\nHm.\n</think>\n\nHm."],
    ),
    (form("hermes", "think", is_thinking=True), [f"Hm.\n</think>\n\n{hermes(NOW)}", f"</think>{hermes(NOW)}"], []),
    (form("llama3"), [LLAMA, f"{LLAMA}; {LLAMA}"], ["Hm.", WEATHER, LLAMA.replace("get_weather", "g")]),
    (form("llama3", only_one=True), [LLAMA], [f"{LLAMA}; {LLAMA}"]),
    (form("mistral"), [f"[TOOL_CALLS][{WEATHER}]", f"[TOOL_CALLS][{WEATHER}, {NOW}]"], ["Hm.", "[TOOL_CALLS][]"]),
    (form("mistral", only_one=True), [f"[TOOL_CALLS][{NOW}]"], [f"[TOOL_CALLS][{WEATHER}, {NOW}]"]),
]
OPTIONAL = [
    (form("hermes"), ["", "Hm < a.", f"Hm.\n{hermes(NOW)}", hermes(NOW, WEATHER) + "\nHm."], ["<tool_call>Hm."]),
    (form("hermes", "think", is_thinking=True), [f"<tool</think>\nHm.{hermes(NOW)}"], ["</think><tool_call>Hm."]),
    (form("llama3"), ["", "Hm. {", "\n Hm.", LLAMA, f"{LLAMA};{LLAMA}"], ["{Hm.", " {Hm."]),
    (form("mistral"), ["", "Hm.", f"[TOOL_CALLS][{NOW}]", f"Hm.[TOOL_CALLS][{NOW}, {NOW}]"], ["[TOOL_CALLS]Hm."]),
]


@pytest.mark.parametrize("made", [PLAIN, SPECIAL], ids=["as text", "as special tokens"])
@pytest.mark.parametrize(
    ("is_required", "asked", "taken", "refused"),
    [(True, *each) for each in REQUIRED] + [(False, *each) for each in OPTIONAL],
    ids=range(len(REQUIRED) + len(OPTIONAL)),
)
def test_what_is_taken(is_required: bool, asked: OutputForm, taken: list[str], refused: list[str], made: Any) -> None:
    for output in taken:
        assert matched(asked, output, made, is_required=is_required) == "whole", output
    for output in refused:
        assert matched(asked, output, made, is_required=is_required) == "refused", output
    for output in taken:  # and the parser finds in it what the grammar has let through
        parser = OutputParser(asked, lambda num_digits: "0" * num_digits)
        parser.push(output)
        parser.flush()
        num_calls = 1 if asked.only_one_call else output.count('"name"')
        assert parser.num_calls == num_calls


@pytest.mark.parametrize("tags", [(), TAGS], ids=["as text", "as special tokens"])
def test_newer_models_of_mistrals(tags: tuple[str, ...]) -> None:
    made, args = tokenizer(*tags), "[ARGS]" if tags else ""
    one, other = f'get_weather{args}{{"city": "Rome"}}', f"now{args}{{}}"
    for output in (f"[TOOL_CALLS]{one}", f"[TOOL_CALLS]{other}[TOOL_CALLS]{one}"):
        assert matched(form("mistral"), output, made, is_required=True, is_listed=False) == "whole"
    assert matched(form("mistral"), f"Hm.[TOOL_CALLS]{one}", made, is_required=False, is_listed=False) == "whole"
    assert matched(form("mistral"), "[TOOL_CALLS]other", made, is_required=True, is_listed=False) == "refused"


def test_arguments_have_the_times_that_answers_have() -> None:
    schemas = {"at": {"type": "object", "properties": {"time": {"type": "string", "format": "date-time"}}}}
    asked = OutputForm("none", False, TOOL_FAMILIES["hermes"], frozenset(schemas), False)
    for second, expected in (("59", "whole"), ("60", "refused")):
        output = hermes(f'{{"name": "at", "arguments": {{"time": "2026-02-03T04:05:{second}Z"}}}}')
        assert matched(asked, output, PLAIN, schemas, is_required=True) == expected


DOCUMENT = json_answer(
    {
        "type": "object",
        "properties": {"é: a ::= b": {"$ref": "#/$defs/n"}},
        "required": ["é: a ::= b"],
        "additionalProperties": False,
        "$defs": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    }
)
WHOLE, WRONG = '{"é: a ::= b": null}', '{"é: a ::= b": "x"}'


@pytest.mark.parametrize("made", [PLAIN, SPECIAL], ids=["as text", "as special tokens"])
def test_an_answer_comes_after_what_is_thought(made: Any) -> None:
    opened, free = OutputForm("think", True), OutputForm("think")
    for asked, taken in (
        (opened, f"Hm {{.\n</think>\n\n{WHOLE}"),
        (free, f"<think>\nHm.</think>{WHOLE}"),
        (free, WHOLE),
    ):
        assert matched(asked, taken, made, {}, answer=DOCUMENT) == "whole", taken
        assert matched(asked, taken.replace(WHOLE, WRONG), made, {}, answer=DOCUMENT) == "refused"
        assert matched(asked, f"{taken}Hm.", made, {}, answer=DOCUMENT) == "refused"
        parser = OutputParser(asked, lambda num_digits: "0" * num_digits)
        assert parser.push(taken).text + parser.flush().text == WHOLE
    assert matched(free, "Hm.", made, {}, answer=DOCUMENT) == "refused"


@pytest.mark.parametrize("made", [PLAIN, SPECIAL], ids=["as text", "as special tokens"])
@pytest.mark.parametrize(("family", "call"), [("hermes", hermes(NOW)), ("mistral", f"[TOOL_CALLS][{NOW}]")])
def test_an_answer_or_calls(family: str, call: str, made: Any) -> None:
    for output in (WHOLE, call):
        assert matched(form(family), output, made, answer=DOCUMENT) == "whole", output
        parser = OutputParser(form(family), lambda num_digits: "0" * num_digits)
        text = parser.push(output).text + parser.flush().text
        assert (text, parser.num_calls) == ((WHOLE, 0) if output == WHOLE else ("", 1))
    for output in (WRONG, "Hm.", f"{WHOLE}{call}"):
        assert matched(form(family), output, made, answer=DOCUMENT) == "refused", output
    assert matched(form(family), WHOLE, made, answer=DOCUMENT, is_required=True) == "refused"


def test_an_answer_that_is_one_of_some_texts() -> None:
    texts = ["a: b", '"ä\\\n', "start: x"]
    for text in texts:
        assert matched(OutputForm("think", True), f"Hm.</think>{text}", PLAIN, {}, answer=any_answer(texts)) == "whole"
    assert matched(OutputForm("think", True), "Hm.</think>x", PLAIN, {}, answer=any_answer(texts)) == "refused"


def test_a_name_and_a_schema_cannot_become_rules() -> None:
    grammar = output_grammar(form("hermes"), SCHEMAS, {}, is_required=True)
    rules = [line.partition(":")[0] for line in grammar.splitlines()]
    assert rules == ["start", "whole", "TEXT", "one", "call_0", "call_0_arguments", "call_1", "call_1_arguments"]
    (schema,) = (line.partition("%json ")[2] for line in grammar.splitlines() if line.startswith("call_0_arguments"))
    assert json.loads(schema)["properties"] == SCHEMAS["get_weather"]["properties"]
