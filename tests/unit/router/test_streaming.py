"""Tests text from tokens: whatever way they come, the same text; stop strings across any boundary."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.router.text.output.families import TOOL_FAMILIES
from services.router.text.output.form import OutputForm
from services.router.text.streaming import Detokeniser, Piece, StopFinder, TextStream, num_begun
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


@given(st.booleans(), st.booleans(), st.sampled_from([[], ["hm"], ["\n", "nothing"]]), st.data())
def test_tokens_of_what_is_thought_are_counted(
    opened: bool, is_token: bool, stops: list[str], data: st.DataObject
) -> None:
    """To the end tag, tags included, however the tokens come; after it, and where nothing is thought, none."""
    end = [2] if is_token else encode("</think>")
    thought = [*encode("" if opened else "<think>"), *encode("\nI see.\n"), *end]
    form, special = OutputForm("think", is_thinking=opened), {"</think>": 2} if is_token else {}
    for ids, expected in ((thought + encode("\n\nyes"), len(thought)), (thought[:-1], len(thought) - 1)):
        stream = TextStream(TOKENIZER, form=form, special_ids=special, stops=stops)
        num_pushed = 0
        for part in cut(ids, data):
            piece = stream.push(part)
            num_pushed += piece.num_tokens
            if piece.is_last:
                break
        else:
            stream.flush()
        assert stream.num_reasoning_tokens == min(expected, num_pushed)
    answer = TextStream(TOKENIZER, form=OutputForm("think"))
    answer.push(encode("yes </think>"))
    answer.flush()
    assert answer.num_reasoning_tokens == 0


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


SPECIAL = {0: "<|pad|>", 1: "<|im_start|>", 2: "<|im_end|>"}
TOKEN = st.one_of(st.sampled_from([0, 1, 2]), st.integers(3, TOKENIZER.get_vocab_size() - 1))


def run(parts: list[list[int]], *, is_stopped: bool = False, **options: Any) -> tuple[str, str | None]:
    stream, text = TextStream(TOKENIZER, special_texts=SPECIAL, **options), ""
    for number, part in enumerate(parts, 1):
        piece = stream.push(part, is_stopped=is_stopped and number == len(parts))
        text += piece.text
        if piece.stop is not None:
            return text, piece.stop
    piece = stream.flush()
    return text + piece.text, piece.stop


@given(
    ids=st.lists(TOKEN, max_size=20),
    stops=st.lists(st.sampled_from(["<|im_end|>", "a<|im", "end|>b", "b", "\ufffd", "|>a<"]), max_size=2),
    options=st.fixed_dictionaries(
        {
            "skip_special_tokens": st.booleans(),
            "includes_stop": st.booleans(),
            "min_tokens": st.integers(0, 4),
            "is_stopped": st.booleans(),
        }
    ),
    data=st.data(),
)
def test_the_text_is_the_same_streamed_and_whole(
    ids: list[int], stops: list[str], options: dict[str, Any], data: st.DataObject
) -> None:
    parts = [part for part in cut(ids, data) if part]
    assert run(parts, stops=stops, **options) == run([ids] if ids else [], stops=stops, **options)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_is_looked_for_in_special_tokens_whether_they_are_shown_or_not(skip: bool) -> None:
    ids = [*encode("ab"), 2, *encode("c")]
    options: dict[str, Any] = {"skip_special_tokens": skip}
    assert run([ids], stops=["<|im_end|>"], **options) == ("ab", "<|im_end|>")
    assert run([ids], stops=["b<|im_end|>c"], **options) == ("a", "b<|im_end|>c")
    assert run([ids], stops=["<|im_end|>"], includes_stop=True, **options) == ("ab<|im_end|>", "<|im_end|>")
    assert run([ids], stops=["<|im_start|>"], **options) == ("abc" if skip else "ab<|im_end|>c", None)


def test_the_text_of_a_stop_token_is_searched_and_shown_only_if_asked_for() -> None:
    ids = [*encode("a"), *encode("b")]
    assert run([ids], is_stopped=True) == ("a", None)
    assert run([ids], is_stopped=True, includes_stop=True) == ("ab", None)
    assert run([ids], is_stopped=True, stops=["ab"]) == ("", "ab")
    assert run([[*ids, 2]], is_stopped=True, skip_special_tokens=False) == ("ab", None)
    assert run([[*ids, 2]], is_stopped=True, skip_special_tokens=False, includes_stop=True) == ("ab<|im_end|>", None)
    assert run([[*ids, 2]], is_stopped=True, stops=["b<|im_end|>"]) == ("a", "b<|im_end|>")
    broken = encode("🙂")[0]
    assert run([[broken, *encode("b")]], is_stopped=True) == ("\ufffd", None)


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "x"), (1, "x"), (2, "xSxx"), (3, "xSxx"), (4, "xSxx"), (5, None)]
)
def test_min_tokens_hold_back_stop_strings(min_tokens: int, expected: str | None) -> None:
    """A stop string counts if a token after the first `min_tokens` completes it, wherever it has begun."""
    ids = [token for letter in "xSxxSx" for token in encode(letter)]
    assert len(ids) == 6
    found = run([[each] for each in ids], stops=["S"], min_tokens=min_tokens)
    assert found == ((expected, "S") if expected else ("xSxxSx", None))
    assert run([[each] for each in ids], stops=["xSx"], min_tokens=2) == ("", "xSx")


def test_a_character_that_the_prompt_begins_is_whole_only_with_echo() -> None:
    ids = encode("🙂")
    prompt, rest = [*encode("ab"), *ids[:3]], [ids[3], *encode("c")]
    assert num_begun(TOKENIZER, prompt) == 3
    assert run([rest], prompt=prompt, begins_in_prompt=True) == ("🙂c", None)
    without, _ = run([rest], prompt=prompt)
    assert without == "\ufffdc"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_prompt_may_be_nothing_but_the_beginning_of_a_character(num_tokens: int) -> None:
    prompt, rest = encode("🙂")[:num_tokens], [*encode("🙂")[num_tokens:], *encode("c")]
    assert num_begun(TOKENIZER, prompt) == num_tokens
    assert run([rest], prompt=prompt, begins_in_prompt=True) == ("🙂c", None)


@pytest.mark.parametrize(("text", "expected"), [("ab", 0), ("", 0), ("🙂", 0)])
def test_a_whole_prompt_begins_no_character(text: str, expected: int) -> None:
    assert num_begun(TOKENIZER, encode(text)) == expected
    assert num_begun(TOKENIZER, [encode("🙂")[3]] * 9) == 0, "bytes that are no character"


def test_a_word_after_the_prompt_keeps_its_blank() -> None:
    """Decoders of SentencePiece's kind take the blank off a text's first word."""
    tokenizer = Tokenizer(models.WordLevel({"▁the": 0, "▁end": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert TextStream(tokenizer).push([1]).text == "end"
    assert TextStream(tokenizer, prompt=[0]).push([1]).text == " end"
