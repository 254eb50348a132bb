"""Turns a parsed body into requests, and their answers into OpenAI's JSON.

An `HttpCall` has requests as the router knows them, each with the `Style` in which its endpoint writes choices. A
writer makes one JSON object of all answers, or the chunks of one stream; no event is written before the first token, so
an error until then is reported by the status, unless a wait was long (`kept_alive`). Log-probabilities of a prompt's
tokens (`PromptScores`) are written as they come, so that no prompt takes the event loop for long. Owns: what is written
when, and the usage of all answers together. Never: bytes on the wire (reply.py).
"""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.answer import Answer, AnswerEvent, append_chunk
from services.router.coordinator.progress import LiveProgress
from services.router.front.call import Incoming
from services.router.front.http.parameters import AS_TEXTS, StreamOptions, TokenOptions
from services.router.front.http.reply import Reply, dump, dump_in_turns
from services.router.text.streaming import CONTEXT_TOKENS, Detokeniser, num_begun
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


MOST_STREAMED_ENTRIES = 1 << 13
"""The most log-probabilities of a prompt that is echoed in a stream; to write these takes some milliseconds."""


class PromptScores:
    """Collects what one answer says of its prompt's tokens: OpenAI's lists, which `echo` begins, and vLLM's
    `prompt_logprobs`. The first token has no log-probability: null stands in its place."""

    def __init__(
        self,
        texts: TokenTexts,
        tokens: TokenOptions = AS_TEXTS,
        *,
        num_echoed: int | None = None,
        num_top: int | None = None,
        is_streamed: bool = False,
    ) -> None:
        """`num_echoed` is how many of the likeliest tokens are in OpenAI's lists, `num_top` in vLLM's; None: there are
        no such lists. `is_streamed`: OpenAI's are written in one turn, so their prompt is bounded."""
        self._texts = texts
        self.tokens = tokens
        self._num_echoed = num_echoed
        self._num_top = num_top
        self._most_entries = MOST_STREAMED_ENTRIES if is_streamed else None
        self._token_ids: Sequence[int] = ()
        self._lists: dict[str, list[object]] | None = None
        self._entries: list[object] | None = None

    @functools.cached_property
    def places(self) -> TextPlaces:
        """Returns where the output's tokens begin in the text: behind those of the prompt, if OpenAI's lists have
        these."""
        return TextPlaces(self._texts)

    @property
    def is_echoed(self) -> bool:
        """Returns whether OpenAI's lists begin with the prompt's tokens."""
        return self._num_echoed is not None

    def ask(self, response: inference_pb2.ResponseOptions) -> None:
        """Asks for what the lists need."""
        wanted = [num for num in (self._num_echoed, self._num_top) if num is not None]
        if wanted:
            response.prompt_logprobs = max(wanted)
            response.echo_token_ids = True

    def begin(self, token_ids: Sequence[int]) -> None:
        """Takes the prompt's tokens, and writes the first. Raises InvalidRequest if they are too many for a stream."""
        self._token_ids = token_ids
        if self.is_echoed and self._most_entries is not None:
            most = self._most_entries // (1 + (self._num_echoed or 0))
            if len(token_ids) > most:
                text = f"cannot have logprobs in a stream: the prompt has {len(token_ids)} tokens, and may have {most}"
                raise InvalidRequest("echo", text)
        if self._num_top is not None:
            self._entries = [None]
        if self.is_echoed:
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


class TextPlaces:
    """Finds where tokens begin in the text of an answer, the prompt's first if the text begins with it.

    The text comes later than its tokens while a character or a possible stop string is incomplete, and the tokens of a
    character begin where it does. A token whose text is left out begins where the next one does.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._detokeniser = Detokeniser(texts.tokenizer, skip_special_tokens=False)
        self._waiting = collections.deque[tuple[int, str]]()
        """The tokens whose places are not told yet, with what they add to the text."""
        self._at = 0

    def continues(self, prompt: Sequence[int]) -> None:
        """Takes the prompt that the tokens follow, of which nothing is in the text."""
        whole = prompt[: len(prompt) - num_begun(self._texts.tokenizer, prompt)]
        before = whole[-CONTEXT_TOKENS:]
        self._detokeniser = Detokeniser(self._texts.tokenizer, skip_special_tokens=False, before=before)

    def add(self, token_ids: Iterable[int]) -> None:
        self._waiting += [(token_id, self._detokeniser.push(token_id)) for token_id in token_ids]

    def copy(self) -> TextPlaces:
        """Returns another that has the same tokens so far."""
        other = copy.copy(self)
        other._detokeniser, other._waiting = copy.copy(self._detokeniser), self._waiting.copy()
        return other

    def told(self, text: str, *, is_whole: bool) -> list[int]:
        """Returns the places of the tokens, after those that were told before, whose text has come: of all if the text
        is whole. They are characters from the text's beginning."""
        places = []
        while self._waiting:
            token_id, piece = self._waiting[0]
            if not text.startswith(piece, self._at):
                if token_id in self._texts.special:
                    piece = ""
                elif not is_whole and len(text) < self._at + len(piece):
                    break
            places.append(self._at)
            self._at = min(self._at + len(piece), len(text))
            self._waiting.popleft()
        return places


Json = dict[str, Any]

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True)
class Ending:
    """Says how an output ended, in OpenAI's words, and which of the request's stops ended it (vLLM's `stop_reason`)."""

    finish_reason: str
    stop_reason: str | int | None

    @staticmethod
    def of(completion: inference_pb2.Completion, request: inference_pb2.GenerateRequest) -> Ending:
        stop_reason: str | int | None = None
        if completion.HasField("stop_string"):
            stop_reason = completion.stop_string
        elif completion.HasField("stop_token_id") and completion.stop_token_id in request.stopping.stop_token_ids:
            stop_reason = completion.stop_token_id
        return Ending(_FINISH_REASONS[completion.finish_reason], stop_reason)

    def fields(self) -> Json:
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}


class Style(Protocol):
    """Writes one choice as one endpoint does. Each answer to a prompt has a style of its own."""

    scores: PromptScores
    """The prompt's log-probabilities, as they come."""

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        """Returns the choice of an answer that is not streamed."""
        ...

    def opening(self) -> Json | None:
        """Returns the choice that comes before the first token's; None for no such choice."""
        ...

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        """Returns the choice with tokens as they arrive; None if the client would see nothing in it."""
        ...

    def closing(self, ending: Ending) -> Json:
        """Returns the last choice."""
        ...


@dataclass(frozen=True)
class Objects:
    """Names the ids and objects of an endpoint."""

    id_prefix: str
    whole: str
    chunk: str


@dataclass(frozen=True)
class Prompt:
    """Describes one prompt of a call, with its request."""

    incoming: Incoming
    style: Style
    params: Mapping[str, str]
    """The request's field names in this body, where they differ."""
    rename: Callable[[str], str] = str
    """Returns the name of a field in this body that is not among `params`."""
    further_styles: Sequence[Style] = ()
    """Those of the answers after the first."""

    @property
    def styles(self) -> list[Style]:
        """Returns the style of each answer, by index."""
        return [self.style, *self.further_styles]

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Returns what is left of the request: the prompt is dropped when it is tokenised."""
        return self.incoming.request


@dataclass(frozen=True)
class HttpCall:
    """Describes a call of an endpoint that answers with choices. It is an `EndpointCall`."""

    prompts: Sequence[Prompt]
    """The prompts in the order of the choices: those of a prompt's answers follow one another."""
    options: StreamOptions
    objects: Objects
    further: Callable[[], Json] = dict
    """Returns fields of the whole answer beside its choices, once all choices are written."""
    opening: Callable[[], Json] = dict
    """Returns fields of a stream's first chunk beside its choices."""

    @property
    def is_stream(self) -> bool:
        return self.options.stream

    def writer(self, request_id: str, model_id: str, reply: Reply) -> Writer:
        return (_Stream if self.is_stream else _Whole)(self, request_id, model_id, reply)


def chat_logprobs(
    texts: TokenTexts,
    token_ids: Iterable[int],
    logprobs: Iterable[types_pb2.TokenLogprobs],
    *,
    are_ids: bool = False,
) -> dict[str, object]:
    """Returns the log-probabilities of a chat's tokens, which are named by their ids if `are_ids`."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        token = texts[token_id]
        name = name_of(token_id) if are_ids else token.text
        return {"token": name, "logprob": finite(logprob), "bytes": list(token.data)}

    content = []
    for token_id, chosen in zip(token_ids, logprobs, strict=True):
        top = [entry(other.token_id, other.logprob) for other in chosen.top]
        content.append({**entry(token_id, chosen.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


Place = tuple[int, int]
"""A choice by its prompt and its answer to that."""
_Kept = TypeVar("_Kept")


def _for_each_choice(call: HttpCall, make: Callable[[], _Kept]) -> dict[Place, _Kept]:
    return {(at, answer): make() for at, prompt in enumerate(call.prompts) for answer in range(len(prompt.styles))}


class Writer(Protocol):
    """Writes what is answered to one call."""

    async def write(self, index: int, answer: Answer) -> None:
        """Writes the answer to the prompt with that index. Returns when all of it was taken; raises its error."""
        ...


_MOST_ENTRIES_AT_ONCE = 2048
"""A choice with more log-probabilities is encoded in turns with others; these take some milliseconds."""
_GROWTH = 4
"""How many times the bytes that it has encoded a message takes in memory, about."""


class _Whole:
    """Writes one object. Each choice is encoded as soon as it is complete, in a turn of its own: a call may have a
    thousand, and the objects take ten times the memory of their JSON. The call is charged for what is kept."""

    def __init__(self, call: HttpCall, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._request_id = request_id
        self._model_id = model_id
        self._reply = reply
        self._outputs = _for_each_choice(call, inference_pb2.Chunk)
        self._usages = _for_each_choice(call, inference_pb2.Usage)
        self._charged = dict.fromkeys(self._outputs, 0)
        self._choices: dict[Place, bytes] = {}
        self._turn = asyncio.Lock()
        """Is held while a choice is encoded: many may be complete at once."""

    async def write(self, index: int, answer: Answer) -> None:
        async for event in answer:
            await self.take(index, event)

    async def take(self, index: int, event: AnswerEvent) -> None:
        prompt = self._call.prompts[index]
        match event:
            case inference_pb2.PromptInfo():
                prompt.style.scores.begin(event.token_ids)
            case inference_pb2.PromptLogprobs():
                prompt.style.scores.add(event)
            case inference_pb2.Chunk():
                place = (index, event.index)
                self._charge(place, self._charged[place] + _GROWTH * event.ByteSize())
                append_chunk(self._outputs[place], event)
            case inference_pb2.Completion():
                await self._complete((index, event.index), Ending.of(event, prompt.request), event.usage)

    async def _complete(self, place: Place, ending: Ending, usage: inference_pb2.Usage) -> None:
        index, answer = place
        prompt, output = self._call.prompts[index], self._outputs[place]
        num_entries = len(output.logprobs) * (1 + prompt.request.response.logprobs)
        async with self._turn:
            choice = prompt.styles[answer].whole(output, ending)
            if self._has_scores or num_entries > _MOST_ENTRIES_AT_ONCE:
                encoded = await dump_in_turns(choice)
            else:
                encoded = dump(choice)
                await asyncio.sleep(0)  # others have their turns before the next choice
        output.Clear()
        self._charge(place, len(encoded))
        self._choices[place], self._usages[place] = encoded, usage
        if len(self._choices) == len(self._outputs):
            await self._finish()

    def _charge(self, place: Place, num_bytes: int) -> None:
        """Sets what is charged for a choice. Raises Overloaded if there is no room for it."""
        if (charge := self._call.prompts[place[0]].incoming.charge) is not None:
            charge.grow(num_bytes - self._charged[place])
            self._charged[place] = num_bytes

    @property
    def _has_scores(self) -> bool:
        return any(prompt.request.response.HasField("prompt_logprobs") for prompt in self._call.prompts)

    async def _finish(self) -> None:
        envelope = dump(_envelope(self._call, self._call.objects.whole, self._request_id, self._model_id))
        fields = {"usage": _sum(self._usages.values()), **self._call.further()}
        rest = await dump_in_turns(fields) if self._has_scores else dump(fields)
        choices = b",".join(self._choices[place] for place in sorted(self._choices))
        await self._reply.encoded(b'%b,"choices":[%b],%b' % (envelope.removesuffix(b"}"), choices, rest[1:]))


class _Stream:
    def __init__(self, call: HttpCall, request_id: str, model_id: str, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        envelope = _envelope(call, call.objects.chunk, request_id, model_id)
        self._head = dump(envelope).removesuffix(b"}") + b',"choices":['
        """Every event begins so: only its choices are encoded anew."""
        self._styles = [prompt.styles for prompt in call.prompts]
        self._usages = _for_each_choice(call, inference_pb2.Usage)
        self._unopened = set(self._usages)
        self._unfinished = set(self._usages)
        self._has_begun = False

    async def write(self, index: int, answer: Answer) -> None:
        await answer.pass_on(functools.partial(self._take, index), self._reply.room)
        if not self._unfinished:
            await self._reply.done()

    def _take(self, index: int, event: AnswerEvent) -> None:
        if events := self._events(index, event):
            self._reply.events(events)

    def _events(self, index: int, event: AnswerEvent) -> list[bytes]:
        """Returns the JSON of each event that the client is sent."""
        prompt = self._call.prompts[index]
        match event:
            case inference_pb2.Chunk():
                place = (index, event.index)
                delta = self._styles[index][event.index].delta(event)
                opening = [] if delta is None else self._opening(place)
                if self._call.options.continuous_usage:
                    self._usages[place].output_tokens += len(event.token_ids)
                return [] if delta is None else [*opening, self._chunk(delta)]
            case inference_pb2.PromptInfo():
                prompt.style.scores.begin(event.token_ids)
                usage = self._usages[index, 0]
                usage.prompt_tokens, usage.cached_tokens = event.prompt_tokens, event.cached_tokens
                return []
            case inference_pb2.PromptLogprobs():
                prompt.style.scores.add(event)
                return []
            case LiveProgress():
                return []  # nobody asks for it over HTTP
            case inference_pb2.Completion():
                place = (index, event.index)
                opening = self._opening(place)
                self._usages[place].CopyFrom(event.usage)
                self._unfinished.remove(place)
                closing = self._styles[index][event.index].closing(Ending.of(event, prompt.request))
                return [*opening, self._chunk(closing), *self._last()]

    def _opening(self, place: Place) -> list[bytes]:
        if place not in self._unopened:
            return []
        self._unopened.remove(place)
        index, answer = place
        opening = self._styles[index][answer].opening()
        return [] if opening is None else [self._chunk(opening)]

    def _last(self) -> list[bytes]:
        if self._unfinished or not self._call.options.include_usage:
            return []
        return [b'%b],"usage":%b}' % (self._head, dump(_sum(self._usages.values())))]

    def _chunk(self, choice: Json) -> bytes:
        options, further = self._call.options, Json()
        if not self._has_begun:
            self._has_begun, further = True, dict(self._call.opening())
        if options.include_usage:
            further["usage"] = _sum(self._usages.values()) if options.continuous_usage else None
        rest = b"," + dump(further)[1:] if further else b"}"
        return b"%b%b]%b" % (self._head, dump(choice), rest)


def _envelope(call: HttpCall, kind: str, request_id: str, model_id: str) -> Json:
    return {
        "id": call.objects.id_prefix + request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model_id,
    }


def _sum(usages: Iterable[inference_pb2.Usage]) -> Json:
    total = inference_pb2.Usage()
    for usage in usages:
        total.prompt_tokens += usage.prompt_tokens
        total.output_tokens += usage.output_tokens
        total.cached_tokens += usage.cached_tokens
        total.reasoning_tokens += usage.reasoning_tokens
    thought = {"completion_tokens_details": {"reasoning_tokens": total.reasoning_tokens}}
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.output_tokens,
        "total_tokens": total.prompt_tokens + total.output_tokens,
        "prompt_tokens_details": {"cached_tokens": total.cached_tokens},
        **(thought if total.reasoning_tokens else {}),
    }
