"""Tests text from tokens: whatever way they come, the same text; stop strings across any boundary."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.text.output.families import TOOL_FAMILIES
from services.router.text.output.form import OutputForm
from services.router.text.streaming import Detokeniser, Piece, StopFinder, TextStream
from tests.support.text_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = st.text(alphabet="ab é中🙂\n", max_size=24)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def cut(items: list[int], data: st.DataObject) -> list[list[int]]:
    places = data.draw(st.sets(st.integers(0, len(items))).map(sorted))
    return [items[start:end] for start, end in pairwise([0, *places, len(items)])]


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns what the definition says: character by character, the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=TEXT, stops=st.lists(st.text(alphabet="ab é中🙂", min_size=1, max_size=4), max_size=3), data=st.data())
def test_any_split_of_the_tokens_gives_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    stream = TextStream(TOKENIZER, stops=stops)
    output, stop = "", None
    for part in cut(encode(text), data):
        piece = stream.push(part)
        output, stop = output + piece.text, piece.stop
        if stop is not None:
            break
    else:
        piece = stream.flush()
        output, stop = output + piece.text, piece.stop
    assert (output, stop) == expected(text, stops)


@given(ids=st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=40), skip=st.booleans())
def test_the_pieces_of_any_tokens_make_up_their_text(ids: list[int], skip: bool) -> None:
    detokeniser = Detokeniser(TOKENIZER, skip_special_tokens=skip)
    pieces = "".join(detokeniser.push(token_id) for token_id in ids) + detokeniser.flush()
    # Bytes that are no character may be shown as one replacement or as several.
    assert pieces.replace("\ufffd", "") == TOKENIZER.decode(ids, skip_special_tokens=skip).replace("\ufffd", "")


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    ids = encode("🙂")
    assert len(ids) == 4
    detokeniser = Detokeniser(TOKENIZER, skip_special_tokens=True)
    assert [detokeniser.push(token_id) for token_id in ids] == ["", "", "", "🙂"]
    assert detokeniser.push(ids[0]) == ""
    assert detokeniser.flush() == "\ufffd"


def test_special_tokens_are_left_out_unless_wanted() -> None:
    ids = [*encode("ab"), 2]
    assert TextStream(TOKENIZER).push(ids).text == "ab"
    assert TextStream(TOKENIZER, skip_special_tokens=False).push(ids).text == "ab<|im_end|>"


def test_garbage_is_not_held_for_ever() -> None:
    broken = encode("🙂")[0]
    detokeniser = Detokeniser(TOKENIZER, skip_special_tokens=True)
    assert "".join(detokeniser.push(broken) for _ in range(100)).startswith("\ufffd")
    assert len(detokeniser._held) < 40


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["END", "ENOUGH"])
    assert finder.push("the E") == ("the ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("T") == ("ENT", None)
    assert finder.push("EN") == ("", None)
    assert finder.flush() == "EN"


@pytest.mark.parametrize(
    ("text", "stops", "result"),
    [
        ("abc", ["abc", "b"], ("a", "b")),
        ("xaab", ["aab", "ab"], ("x", "aab")),
        ("aaab", ["aab"], ("a", "aab")),
        ("none", ["x"], ("none", None)),
    ],
)
def test_the_first_complete_stop_string_wins_then_the_longest(
    text: str, stops: list[str], result: tuple[str, str | None]
) -> None:
    finder = StopFinder(stops)
    before, stop = finder.push(text)
    assert (before if stop else before + finder.flush(), stop) == result


def test_tokens_are_counted_up_to_the_one_that_completes_the_stop_string() -> None:
    ids = [token for letter in "xySTOPz" for token in encode(letter)]
    assert TextStream(TOKENIZER, stops=["STOP"]).push(ids) == Piece("xy", 6, "STOP")


def test_a_stop_string_may_be_completed_by_the_last_held_character() -> None:
    broken = encode("🙂")[0]
    stream = TextStream(TOKENIZER, stops=["a\ufffd"])
    assert stream.push([*encode("ba"), broken]) == Piece("b", 2 if len(encode("ba")) == 1 else 3)
    assert stream.flush() == Piece("", 0, "a\ufffd")


def test_a_special_token_that_is_a_tag_is_parsed_and_not_shown() -> None:
    """A tag, for which `<|im_end|>` stands here, is left out of the text, and ends what was thought all the same."""
    ids = [*encode("hm"), 2, *encode("yes"), 2, 1]
    form, special = OutputForm("think", is_thinking=True), {"</think>": 2}
    stream = TextStream(TOKENIZER, form=form, special_ids=special)
    assert stream.push(ids) == Piece("yes", len(ids), reasoning="hm")
    shown = TextStream(TOKENIZER, skip_special_tokens=False, form=form, special_ids=special)
    assert shown.push(ids) == Piece("", len(ids), reasoning="hm<|im_end|>yes<|im_end|><|im_start|>")


def test_the_one_call_that_is_wanted_ends_the_output() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}'
    ids = [*encode("Hm. " + call), *encode("</tool_call>")]
    form = OutputForm(tools=TOOL_FAMILIES["hermes"], names={"f"}, only_one_call=True)
    whole, one_by_one = TextStream(TOKENIZER, form=form), TextStream(TOKENIZER, form=form)
    piece = whole.push(ids)
    (part,) = piece.calls
    assert (piece.text, part.name, part.arguments, piece.is_last) == ("Hm.", "f", '{"a": 1}', True)
    assert piece.num_tokens == len(encode("Hm. " + call))
    pieces = list(itertools.takewhile(lambda each: not each.is_last, (one_by_one.push([id_]) for id_ in ids)))
    assert len(pieces) + 1 == piece.num_tokens
    assert "".join(each.text for each in pieces) == "Hm."
    assert piece.raw == "Hm. " + call
