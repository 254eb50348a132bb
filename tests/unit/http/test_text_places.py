"""Tests where tokens begin in the text that is returned: never beyond it, and the same in a stream and as a whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.front.http.answers import MOST_STREAMED_ENTRIES, Ending, PromptScores
from services.router.front.http.completions import CompletionStyle
from services.router.front.http.parameters import TokenOptions
from services.router.text.streaming import TextStream
from services.router.text.token_texts import TokenTexts
from tests.support.text_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
STOPPED = Ending("stop", None)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def _chunks(ids: list[int], **options: Any) -> list[inference_pb2.Chunk]:
    """Returns an answer as chunks of one token each, with log-probabilities."""
    stream, chunks = TextStream(TOKENIZER, special_texts=TEXTS.special, **options), []
    for token_id in ids:
        piece = stream.push([token_id])
        logprobs = [types_pb2.TokenLogprobs(logprob=-1.0)]
        chunks.append(inference_pb2.Chunk(text=piece.text, token_ids=[token_id], logprobs=logprobs))
        if piece.is_last:
            return chunks
    return [*chunks, inference_pb2.Chunk(text=stream.flush().text)]


def _whole(chunks: list[inference_pb2.Chunk]) -> inference_pb2.Chunk:
    return inference_pb2.Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=[entry for chunk in chunks for entry in chunk.logprobs],
    )


def _streamed(chunks: list[inference_pb2.Chunk], scores: PromptScores | None = None) -> tuple[list[int], list[str]]:
    style = CompletionStyle(TEXTS, 0, scores or PromptScores(TEXTS))
    written = [style.delta(chunk) for chunk in chunks] + [style.closing(STOPPED)]
    lists = [choice["logprobs"] for choice in written if choice is not None and choice["logprobs"]]
    places = [place for each in lists for place in each["text_offset"]]
    text = ""
    for choice in written:
        text += "" if choice is None else choice["text"]
        told = choice["logprobs"]["text_offset"] if choice is not None and choice["logprobs"] else []
        assert all(place <= len(text) for place in told), "of a text that has come"
    return places, [token for each in lists for token in each["tokens"]]


TOKEN = st.one_of(st.sampled_from([*encode("ab🙂é"), 1, 2]), st.integers(0, TOKENIZER.get_vocab_size() - 1))


@given(
    ids=st.lists(TOKEN, min_size=1, max_size=12),
    stops=st.lists(st.sampled_from(["a", "b🙂", "<|im_end|>"]), max_size=1),
    skip=st.booleans(),
)
def test_places_are_within_the_text_streamed_and_whole(ids: list[int], stops: list[str], skip: bool) -> None:
    chunks = _chunks(ids, stops=stops, skip_special_tokens=skip)
    output = _whole(chunks)
    lists = CompletionStyle(TEXTS, 0, PromptScores(TEXTS)).whole(output, STOPPED)["logprobs"]
    places = lists["text_offset"]
    assert len(places) == len(output.token_ids)
    assert places == sorted(places)
    assert all(0 <= place <= len(output.text) for place in places)
    assert _streamed(chunks) == (places, lists["tokens"])


def test_the_tokens_of_a_character_begin_where_it_does_and_hidden_ones_take_no_room() -> None:
    ids = [*encode("a"), 2, *encode("🙂"), *encode("b")]
    lists = CompletionStyle(TEXTS, 0, PromptScores(TEXTS)).whole(_whole(_chunks(ids)), STOPPED)["logprobs"]
    assert lists["text_offset"] == [0, 1, 1, 1, 1, 1, 2]


def test_what_a_prompt_has_begun_takes_no_room_in_what_follows_it() -> None:
    whole = encode("a🙂")
    prompt, output_ids = whole[:-1], [*whole[-1:], *encode("bc")]
    scores = PromptScores(TEXTS)
    scores.begin(prompt)
    output = _whole(_chunks(output_ids, prompt=prompt))
    lists = CompletionStyle(TEXTS, 0, scores).whole(output, STOPPED)["logprobs"]
    places = dict(zip(lists["tokens"], lists["text_offset"], strict=True))
    assert output.text == "\ufffdbc"
    assert places["c"] == 2


def _echoed(prompt_ids: list[int], *, is_streamed: bool = False) -> PromptScores:
    scores = PromptScores(TEXTS, num_echoed=0, is_streamed=is_streamed)
    scores.begin(prompt_ids)
    rest = [types_pb2.TokenLogprobs(logprob=-1.0)] * (len(prompt_ids) - 1)
    scores.add(inference_pb2.PromptLogprobs(position=1, logprobs=rest))
    return scores


@pytest.mark.parametrize("prompt", ["ab <|im_end|>c", "🙂b"])
@pytest.mark.parametrize("output", ["xy", ""])
def test_a_prompt_that_is_echoed_counts(prompt: str, output: str) -> None:
    """A special token in front, which the prompt's text does not have, takes no room; one in the text does."""
    prompt_ids = [1, *encode(prompt)]
    chunks = [inference_pb2.Chunk(text=prompt), *_chunks(encode(output))]
    lists = CompletionStyle(TEXTS, 0, _echoed(prompt_ids)).whole(_whole(chunks), STOPPED)["logprobs"]
    places = dict(zip(lists["tokens"], lists["text_offset"], strict=True))
    assert lists["text_offset"][:2] == [0, 0]
    assert places.get("x") == (len(prompt) if output else None)
    assert places["b"] == prompt.index("b")
    chunks[1:2] = [_whole(chunks[:2])] if output else []  # what is echoed comes with the first token
    assert _streamed(chunks[1:] or chunks, _echoed(prompt_ids, is_streamed=True)) == (
        lists["text_offset"],
        lists["tokens"],
    )


def test_a_prompt_that_is_echoed_in_a_stream_is_bounded() -> None:
    scores = PromptScores(TEXTS, num_echoed=3, is_streamed=True)
    scores.begin([5] * (MOST_STREAMED_ENTRIES // 4))
    with pytest.raises(InvalidRequest, match="may have 2048"):
        scores.begin([5] * (MOST_STREAMED_ENTRIES // 4 + 1))


@given(outputs=st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=2, max_size=3), echoes=st.booleans())
def test_each_of_several_answers_has_its_own_places(outputs: list[list[int]], echoes: bool) -> None:
    """Answers to one prompt come side by side, and their places are what each has alone."""
    prompt = encode("ab c")

    def scored() -> PromptScores:
        scores = PromptScores(TEXTS, num_echoed=0 if echoes else None)
        scores.begin(prompt)
        rest = [types_pb2.TokenLogprobs(logprob=-1.0)] * (len(prompt) - 1)
        scores.add(inference_pb2.PromptLogprobs(position=1, logprobs=rest))
        return scores

    answers = [_chunks(ids, prompt=prompt) for ids in outputs]
    shared = scored()
    wholes = [CompletionStyle(TEXTS, index, shared).whole(_whole(each), STOPPED) for index, each in enumerate(answers)]
    alone = [CompletionStyle(TEXTS, 0, scored()).whole(_whole(each), STOPPED) for each in answers]
    assert [each["logprobs"] for each in wholes] == [each["logprobs"] for each in alone]
    shared = scored()
    styles = [CompletionStyle(TEXTS, index, shared) for index in range(len(answers))]
    written: list[list[Any]] = [[] for _ in answers]
    for turn in itertools.zip_longest(*answers):
        for style, choices, chunk in zip(styles, written, turn, strict=True):
            choices += [] if chunk is None else [style.delta(chunk)]
    for index, (choices, style, chunks) in enumerate(zip(written, styles, answers, strict=True)):
        choices.append(style.closing(STOPPED))
        single = CompletionStyle(TEXTS, index, scored())
        assert choices == [*(single.delta(chunk) for chunk in chunks), single.closing(STOPPED)]


def test_tokens_that_look_the_same_have_names_of_their_own() -> None:
    first, second, third = encode("🙂")[1:4]
    (a,) = encode("a")
    assert TEXTS[first].text == TEXTS[second].text == TEXTS[third].text
    top = [types_pb2.TopLogprob(token_id=each, logprob=-place) for place, each in enumerate((first, a, second), 1)]
    output = inference_pb2.Chunk(
        text="?", token_ids=[second], logprobs=[types_pb2.TokenLogprobs(logprob=-3.0, top=top)]
    )
    lists = CompletionStyle(TEXTS, 0, PromptScores(TEXTS)).whole(output, STOPPED)["logprobs"]
    (found,) = lists["top_logprobs"]
    assert list(found.items()) == [(f"token_id:{first}", -1.0), ("a", -2.0), ("\ufffd", -3.0)]
    assert found[lists["tokens"][0]] == lists["token_logprobs"][0], "the chosen token's is found by its text"
    output.logprobs[0].top.pop()
    output.token_ids[0] = third
    as_ids = PromptScores(TEXTS, TokenOptions(are_ids=True, are_listed=False))
    lists = CompletionStyle(TEXTS, 0, as_ids).whole(output, STOPPED)["logprobs"]
    assert list(lists["top_logprobs"][0]) == [f"token_id:{each}" for each in (first, a, third)]
