"""Writes log-probabilities of a prompt's tokens: in OpenAI's lists, which `echo` begins, and vLLM's `prompt_logprobs`.

The first token has none: null stands in its place. Parts are written as they come, so that no prompt takes the event
loop for long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from baton.v1 import inference_pb2, types_pb2
from services.router.front.http.parameters import AS_TEXTS, TokenOptions
from services.router.front.http.text_places import TextPlaces
from services.router.text.token_texts import TokenTexts

# JSON has no infinity, which is the log-probability of a masked token. vLLM uses the same bound.
_LEAST = -9999.0


def finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def name_of(token_id: int) -> str:
    """Returns a token's name by its id, as vLLM has it."""
    return f"token_id:{token_id}"


def completion_logprobs(
    texts: TokenTexts,
    token_ids: Iterable[int],
    logprobs: Iterable[types_pb2.TokenLogprobs],
    num_top: int | None = None,
    *,
    are_ids: bool = False,
) -> dict[str, list[object]]:
    """Returns the lists of /v1/completions but for `text_offset`.

    `num_top` is how many of the likeliest tokens to write of those that are there; None for all. They are named by
    their texts, or by their ids if `are_ids`.
    """
    lists: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        name = name_of(token_id) if are_ids else texts[token_id].text
        lists["tokens"].append(name)
        lists["token_logprobs"].append(finite(entry.logprob))
        # The likeliest first. The chosen token is always listed, and has its text; of others with the same text all but
        # the first are named by their ids.
        named, top = {name: token_id}, dict[str, float]()
        for other in entry.top[:num_top]:
            text = name_of(other.token_id) if are_ids else texts[other.token_id].text
            if named.setdefault(text, other.token_id) != other.token_id:
                text = name_of(other.token_id)
            top[text] = finite(other.logprob)
        top.setdefault(name, finite(entry.logprob))
        lists["top_logprobs"].append(top)
    return lists


class PromptScores:
    """Collects what one prompt's answer says of the prompt's tokens."""

    def __init__(
        self,
        texts: TokenTexts,
        tokens: TokenOptions = AS_TEXTS,
        *,
        num_echoed: int | None = None,
        num_top: int | None = None,
    ) -> None:
        """`num_echoed` is how many of the likeliest tokens are in OpenAI's lists, `num_top` in vLLM's; None: there are
        no such lists."""
        self._texts = texts
        self.tokens = tokens
        self._num_echoed = num_echoed
        self._num_top = num_top
        self._token_ids: Sequence[int] = ()
        self._lists: dict[str, list[object]] | None = None
        self._entries: list[object] | None = None

    @functools.cached_property
    def places(self) -> TextPlaces:
        """Returns where the output's tokens begin in the text: behind those of the prompt, if OpenAI's lists have
        these."""
        return TextPlaces(self._texts)

    def ask(self, response: inference_pb2.ResponseOptions) -> None:
        """Asks for what the lists need."""
        wanted = [num for num in (self._num_echoed, self._num_top) if num is not None]
        if wanted:
            response.prompt_logprobs = max(wanted)
            response.echo_token_ids = True

    def begin(self, token_ids: Sequence[int]) -> None:
        """Takes the prompt's tokens, and writes the first."""
        self._token_ids = token_ids
        if self._num_top is not None:
            self._entries = [None]
        if self._num_echoed is not None:
            first = name_of(token_ids[0]) if self.tokens.are_ids else self._texts[token_ids[0]].text
            self._lists = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None]}
            self.places.add(token_ids[:1])
        elif token_ids:
            self.places.continues(token_ids)

    def add(self, part: inference_pb2.PromptLogprobs) -> None:
        token_ids = self._token_ids[part.position : part.position + len(part.logprobs)]
        if self._entries is not None:
            pairs = zip(token_ids, part.logprobs, strict=True)
            self._entries.extend(self._entry(token_id, entry) for token_id, entry in pairs)
        if self._lists is not None:
            self.places.add(token_ids)
            lists = completion_logprobs(
                self._texts, token_ids, part.logprobs, self._num_echoed, are_ids=self.tokens.are_ids
            )
            for name, values in lists.items():
                self._lists[name] += values

    def echoed(self, output: dict[str, list[object]] | None) -> dict[str, list[object]] | None:
        """Returns the lists of the prompt and then of the output."""
        if self._lists is None or output is None:
            return output if self._lists is None else dict(self._lists)
        return {name: values + output[name] for name, values in self._lists.items()}

    def listed(self, output: inference_pb2.Chunk) -> dict[str, object]:
        """Returns vLLM's field with the ids of an output's tokens, if it was asked for."""
        return {"token_ids": list(output.token_ids)} if self.tokens.are_listed else {}

    def prompt_ids(self) -> dict[str, object]:
        """Returns vLLM's field with the ids of the prompt's tokens, if it was asked for."""
        return {"prompt_token_ids": list(self._token_ids)} if self.tokens.are_listed else {}

    def fields(self) -> dict[str, object]:
        """Returns vLLM's field, if it was asked for."""
        return {} if self._entries is None else {"prompt_logprobs": self._entries}

    def _entry(self, token_id: int, entry: types_pb2.TokenLogprobs) -> dict[str, object]:
        """Returns the log-probabilities at one place by token id: the prompt's token first, then the likeliest."""
        assert self._num_top is not None
        found = {str(token_id): self._logprob(token_id, entry.logprob, entry.rank if entry.HasField("rank") else None)}
        for place, top in enumerate(entry.top[: self._num_top], 1):
            found.setdefault(str(top.token_id), self._logprob(top.token_id, top.logprob, place))
        return dict(found)

    def _logprob(self, token_id: int, logprob: float, rank: int | None) -> dict[str, object]:
        text = name_of(token_id) if self.tokens.are_ids else self._texts[token_id].text
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
