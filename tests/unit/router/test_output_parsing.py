"""Tests that outputs are taken apart into thoughts, text and calls of tools: the same whatever the pieces are, and
nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.text.output.calls import MOST_HELD_CHARS
from services.router.text.output.families import TOOL_FAMILIES
from services.router.text.output.form import OutputForm, OutputParser
from services.router.text.output.parts import CallPart, Parsed
from services.router.text.output.reader import MOST_BLANKS
from services.router.text.output.tags import MARKS, TAGS

NAMES = frozenset({"f", "get_weather"})
HERMES, LLAMA, MISTRAL = (TOOL_FAMILIES[name] for name in ("hermes", "llama3", "mistral"))
FORMS = [
    OutputForm(reasoning, is_thinking, family, NAMES, only_one)
    for reasoning, is_thinking in (("none", False), ("think", False), ("think", True))
    for family in (None, HERMES, LLAMA, MISTRAL)
    for only_one in (False, True)
]
FRAGMENTS = [
    *TAGS,
    *MARKS.values(),
    *(
        "<",
        "[",
        "{",
        "}",
        "]",
        '"',
        "\\",
        ",",
        ":",
        ";",
        " ",
        "\n",
        "\n\n",
        "é",
        "🙂",
        "f",
        "a <b",
        "</",
        " " * 600,
        "f" * 300,
    ),
    *('{"name": "f", "arguments": {"a": "}"}}', '{"name":"get_weather","parameters":{"b":[{}]}}'),
    *('{"arguments": {"x": "\\"]"}, "name": "f"}', '{"name": "g", "arguments": {}}', '"name": "f"', '"arguments": {'),
    *('f{"a": 1}', '[{"name": "f", "arguments": {}}, {"name": "f"}]', '{"type": "function", "id": "1"'),
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def parsed(form: OutputForm, pieces: Sequence[str]) -> tuple[Parsed, int]:
    """Returns the sum, with the ids counted up, and the number of calls."""
    ids = itertools.count(1)
    parser = OutputParser(form, lambda num_digits: f"{next(ids):0{num_digits}}")
    total = Parsed.of([*(parser.push(piece) for piece in pieces), parser.flush()])
    return total, parser.num_calls


def calls(output: str, family: Any, **form: Any) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text, and name and arguments of each call; character by character it must be the same."""
    whole, num_calls = parsed(OutputForm(tools=family, names=NAMES, **form), [output])
    assert parsed(OutputForm(tools=family, names=NAMES, **form), list(output))[0] == whole
    assert [part.index for part in whole.calls] == list(range(num_calls))
    return whole.text, [(part.name, part.arguments) for part in whole.calls]


@settings(max_examples=600)
@given(form=st.sampled_from(FORMS), output=OUTPUTS, data=st.data())
def test_any_pieces_give_what_the_whole_gives(form: OutputForm, output: str, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(0, len(output))).map(sorted))
    pieces = [output[start:end] for start, end in itertools.pairwise([0, *cuts, len(output)])]
    assert parsed(form, pieces) == parsed(form, [output])
    assert parsed(form, list(output)) == parsed(form, [output])


@settings(max_examples=400)
@given(family=st.sampled_from([HERMES, LLAMA, MISTRAL]), output=OUTPUTS)
@example(HERMES, '<tool_call>{"name": "f", "arguments": [')
@example(MISTRAL, "[TOOL_CALLS]f[CALL_ID][ARGS")
def test_what_is_no_call_is_text(family: Any, output: str) -> None:
    """No part of an output without calls is lost, but for special tokens; with calls, their own parts are missing."""
    whole, num_calls = parsed(OutputForm(tools=family, names=NAMES), [output])
    visible = "".join(char for char in output if char not in MARKS.values())
    if not num_calls:
        assert whole.text == visible
    given = whole.text + "".join(part.name + part.arguments for part in whole.calls if part.arguments != "{}")
    assert len(given) <= len(visible)
    assert not set(whole.text + "".join(part.arguments for part in whole.calls)) & set(MARKS.values())


def test_hermes() -> None:
    output = (
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "{\\"}", "days": [1, {}]}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n'
    )
    expected = [("get_weather", '{"city": "{\\"}", "days": [1, {}]}'), ("f", '{"a": 1}')]
    assert calls(output, HERMES) == ("I look.", expected)
    unclosed = '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f"}</tool_call> and then'
    assert calls(unclosed, HERMES) == (" and then", [("f", "{}"), ("f", "{}")])


def test_llama() -> None:
    two = '{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "get_weather", "parameters": {}}'
    assert calls(two, LLAMA) == ("", [("f", '{"a": 1}'), ("get_weather", "{}")])
    assert calls(f"<|python_tag|>{two}", LLAMA) == ("", [("f", '{"a": 1}'), ("get_weather", "{}")])
    assert calls(f"Well, {MARKS['<|python_tag|>']}{two}", LLAMA)[1] == [("f", '{"a": 1}'), ("get_weather", "{}")]
    for text in ('It is {"name": "f", "parameters": {}}', '{"answer": 42}', '{"name": "f"}', '{"name": "f", "a": 1}'):
        assert calls(text, LLAMA) == (text, [])
    assert calls(MARKS["<|python_tag|>"] + "f.call(x=1)", LLAMA) == ("f.call(x=1)", [])


def test_mistral() -> None:
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "f", "id": "abcdefghi"}]'
    assert calls(listed, MISTRAL) == ("", [("f", '{"a": 1}'), ("f", "{}")])
    assert calls(listed.replace("[TOOL_CALLS]", MARKS["[TOOL_CALLS]"]), MISTRAL)[1] == [("f", '{"a": 1}'), ("f", "{}")]
    named = 'Hm.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"b": 2}[TOOL_CALLS]f[ARGS]{}'
    assert calls(named, MISTRAL) == ("Hm.", [("f", '{"a": 1}'), ("get_weather", '{"b": 2}'), ("f", "{}")])
    assert calls("[TOOL_CALLS]g{}", MISTRAL) == ("[TOOL_CALLS]g{}", [])
    whole, _ = parsed(OutputForm(tools=MISTRAL, names=NAMES), [listed])
    assert [part.call_id for part in whole.calls] == ["000000001", "000000002"]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": f, "arguments": {}}</tool_call>',
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f"',
        "a <tool_cal",
        "<tool_call>" + " " * (MOST_BLANKS + 1) + '{"name": "f", "arguments": {}}',
        '<tool_call>{"' + "k" * 600 + '": 1',
        '<tool_call>{"arguments": {"a": "' + "x" * MOST_HELD_CHARS + '"}, "name": "f"}</tool_call>',
    ],
    ids=range(9),
)
def test_a_malformed_call_is_text(text: str) -> None:
    whole, num_calls = parsed(
        OutputForm(tools=HERMES, names=NAMES), [text[start : start + 9999] for start in range(0, len(text), 9999)]
    )
    assert (whole.text, num_calls) == (text, 0)


def test_the_name_comes_first_and_arguments_as_they_come() -> None:
    parser = OutputParser(OutputForm(tools=HERMES, names=NAMES), lambda num_digits: "0" * num_digits)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == Parsed()
    assert parser.push('{"a"').calls == (CallPart(0, "call_" + "0" * 24, "f", '{"a"'),)
    assert parser.push(": 1, ").calls == (CallPart(0, arguments=": 1, "),)
    assert parser.push('"b": "x').calls == (CallPart(0, arguments='"b": "x'),)
    assert parser.push('"}}\n</tool_call>').calls == (CallPart(0, arguments='"}'),)
    assert parser.flush() == Parsed()


def test_arguments_that_are_cut_off_stay_arguments() -> None:
    assert calls('<tool_call>{"name": "f", "arguments": {"a": "x', HERMES) == ("", [("f", '{"a": "x')])


@pytest.mark.parametrize(
    ("family", "output"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n' * 2),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 1}}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 1}}]'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}'),
    ],
)
def test_wherever_an_output_of_calls_alone_is_cut_off_it_has_no_text(family: Any, output: str) -> None:
    for thought in ("", "<think>hm</think>\n"):
        form = OutputForm("think" if thought else "none", tools=family, names=NAMES, only_calls=True)
        for length in range(len(output) + 1):
            whole, num_calls = parsed(form, [thought + output[:length]])
            assert parsed(form, list(thought + output[:length]))[0] == whole
            assert (whole.text, whole.reasoning) == ("", thought and "hm")
            assert all('{"a": 1}'.startswith(part.arguments) for part in whole.calls)
        assert num_calls == 2


def test_after_the_one_call_that_is_wanted_nothing_is_read() -> None:
    output = (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>x'
    )
    assert calls(output, HERMES, only_one_call=True) == ("", [("f", "{}")])


@pytest.mark.parametrize(
    ("output", "is_thinking", "reasoning", "text"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes.\n", False, "hm\n\nso", "Yes.\n"),
        ("hm\n</think>\nYes.", True, "hm", "Yes."),
        ("<think>\nhm</think>Yes.", True, "hm", "Yes."),
        ("\n\nhm </think", True, "hm </think", ""),
        ("\n</think>\n\nYes.", True, "", "Yes."),
        ("Yes. <think>hm</think>", False, "", "Yes. <think>hm</think>"),
        ("  <thin", False, "", "  <thin"),
        ("<think>hm</thin></think>", False, "hm</thin>", ""),
        (f"{MARKS['<think>']}hm{MARKS['</think>']}Yes.", False, "hm", "Yes."),
        ("\n" * 3000 + "Yes.", False, "", "\n" * 3000 + "Yes."),
        ("a" + "\n" * 3000 + "</think>Yes.", True, "a" + "\n" * (3000 - 3000 % 64), "Yes."),
    ],
    ids=range(11),
)
def test_reasoning(output: str, is_thinking: bool, reasoning: str, text: str) -> None:
    for pieces in ([output], list(output)):
        assert parsed(OutputForm("think", is_thinking), pieces)[0] == Parsed(reasoning, text)


def test_a_call_comes_after_what_was_thought() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    whole, num_calls = parsed(OutputForm("think", False, HERMES, NAMES), [f"<think>\n{call}?\n</think>\n\n{call}"])
    assert (whole.reasoning, whole.text, num_calls) == (f"{call}?", "", 1)


def test_no_tag_has_its_first_character_again() -> None:
    assert all(tag[0] not in tag[1:] for tag in TAGS)
