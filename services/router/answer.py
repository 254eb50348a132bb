"""Holds one request's answer on its way to the client: the coordinator adds to it, and the RPC sends from it.

Owns: its outputs, one or several (`Output`), whose buffers are bounded by max_tokens, and by how many
log-probabilities of a prompt `validation.py` allows, so nothing ever waits for a client. They are emptied in chunks of
bounded size: gRPC clients accept no message above 4 MiB unless configured to. Never: gRPC, or what happens to the
request.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import BatonError
from services.router.coordinator.events import EmitFinished, EmitPromptTokens, EmitStarted, FinishReason, Summary
from services.router.coordinator.progress import LiveProgress
from services.router.tenants.tenant import TokenUsage
from services.router.text.output.parts import Parsed
from services.router.text.streaming import CONTEXT_TOKENS, Piece, TextStream

AnswerEvent = (
    inference_pb2.PromptInfo
    | inference_pb2.PromptLogprobs
    | inference_pb2.Chunk
    | inference_pb2.Completion
    | LiveProgress
)

MAX_CHUNK_TOKENS = 256
"""The most tokens in one chunk.

With 20 log-probabilities each they take 80 KB in a message, and as JSON less than 1 MB.
"""
_MAX_PART_ENTRIES = 512
"""The most log-probabilities in one part of the prompt's: a front writes a part at a time, in some milliseconds."""


class Room:
    """Says whether a client has room for more. What it has been sent and has not read is bounded by that."""

    def __init__(self) -> None:
        self.is_there = True
        self.awaited: collections.deque[Callable[[], None]] = collections.deque()
        """What is called when there is room again; whoever was called last is the last the next time."""

    def made(self) -> None:
        self.is_there = True
        for _ in range(len(self.awaited)):
            if self.is_there:
                self.awaited.rotate(-1)
                self.awaited[-1]()


_Decoded = tuple[Parsed, Sequence[int], Sequence[Any]]
"""Some tokens, few enough for a chunk, with their log-probabilities, and before them what became certain with them."""


def _next_chunk(index: int, pieces: collections.deque[_Decoded]) -> inference_pb2.Chunk:
    """Removes the first pieces, as many as fit into a chunk, and returns that. There must be some."""
    parsed, token_ids, logprobs = pieces.popleft()
    if pieces:  # rarely: clients read as fast as tokens come
        all_parsed, token_ids, logprobs = [parsed], list(token_ids), list(logprobs)
        while pieces and len(token_ids) + len(pieces[0][1]) <= MAX_CHUNK_TOKENS:
            parsed, more_ids, more_logprobs = pieces.popleft()
            all_parsed.append(parsed)
            token_ids.extend(more_ids)
            logprobs.extend(more_logprobs)
        parsed = Parsed.of(all_parsed)
    chunk = inference_pb2.Chunk(index=index, text=parsed.text, token_ids=token_ids, logprobs=logprobs)
    if parsed.reasoning:
        chunk.reasoning = parsed.reasoning
    for part in parsed.calls:
        chunk.tool_calls.add(index=part.index, id=part.call_id, name=part.name, arguments=part.arguments)
    return chunk


class Output:
    """Holds the output with one index."""

    def __init__(
        self,
        index: int,
        request: inference_pb2.GenerateRequest,
        tokenizer: Tokenizer,
        *,
        kept_chars: int,
        echoed: str = "",
        **text: Any,
    ) -> None:
        """`kept_chars` is how much of the text `kept_text` may have. `echoed` is the text that comes before the
        output's. `text` are further parameters of TextStream."""
        self._index = index
        self._text = TextStream(
            tokenizer,
            skip_special_tokens=skips_special_tokens(request),
            stops=request.stopping.stop,
            includes_stop=request.response.include_stop_text,
            min_tokens=request.stopping.min_tokens,
            **text,
        )
        self._echoed = echoed
        self._echoes_only = echoes_only(request)
        self._pending: collections.deque[_Decoded] = collections.deque()
        """What the client has not taken yet, in order."""
        self._completion: inference_pb2.Completion | None = None
        self.kept_text = ""
        self._kept_chars = kept_chars
        self.num_tokens = 0
        """Tokens that belong to the output; a stop string may cut off some that were received."""
        self.stop_string: str | None = None
        self.ended_by_text = False
        """Its text has ended it, before the worker did: by a stop string, or with the one call that was wanted."""
        self.reason: FinishReason | None = None
        """Why it ended; None before."""
        self.taken = False
        """Whether the client has all of it, its completion too."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Any], *, is_stopped: bool = False) -> bool:
        """Adds tokens, of which the last may be a stop token. Returns True if the text ends with them; tokens after
        that are ignored."""
        if self._echoes_only:  # workers make at least one token
            return False
        self._echo()
        for start in range(0, len(token_ids), MAX_CHUNK_TOKENS):
            if self.ended_by_text:
                break
            part = token_ids[start : start + MAX_CHUNK_TOKENS]
            is_last_part = start + len(part) == len(token_ids)
            piece = self._text.push(part, is_stopped=is_stopped and is_last_part)
            self._take(piece, part[: piece.num_tokens], logprobs[start : start + piece.num_tokens])
            if piece.is_last:
                return True
        return False

    def finish(self, action: EmitFinished) -> inference_pb2.Completion:
        """Ends the output, and returns its completion without what the whole request has in common."""
        self._echo()
        if not self.ended_by_text:
            self._take(self._text.flush())
        self.reason = FinishReason.STOP if self.ended_by_text else action.reason
        if self._echoes_only:
            self.reason = FinishReason.LENGTH
        completion = inference_pb2.Completion(index=self._index, finish_reason=f"FINISH_REASON_{self.reason.name}")
        if self.ended_by_text:
            if self.stop_string is not None:
                completion.stop_string = self.stop_string
        elif action.stop_token_id is not None and not self._echoes_only:
            completion.stop_token_id = action.stop_token_id
        if self._text.num_calls and self.reason is FinishReason.STOP:
            completion.finish_reason = types_pb2.FINISH_REASON_TOOL_CALLS
        completion.usage.output_tokens = self.num_tokens
        completion.usage.reasoning_tokens = self._text.num_reasoning_tokens
        self._completion = completion
        return completion

    @property
    def num_waiting_tokens(self) -> int:
        """Returns how many tokens the client has not taken yet."""
        return sum(len(token_ids) for _, token_ids, _ in self._pending)

    def take(self) -> inference_pb2.Chunk | inference_pb2.Completion | None:
        """Removes and returns what is next; None if nothing is there."""
        if self._pending:
            return _next_chunk(self._index, self._pending)
        if self._completion is None or self.taken:
            return None
        self.taken = True
        return self._completion

    def _echo(self) -> None:
        """Adds what is echoed, with the first tokens: nothing is written before."""
        if self._echoed:
            self._pending.append((Parsed(text=self._echoed), (), ()))
            self._echoed = ""

    def _take(self, piece: Piece, token_ids: Sequence[int] = (), logprobs: Sequence[Any] = ()) -> None:
        parsed = Parsed(piece.reasoning, piece.text, piece.calls)
        if token_ids or parsed:
            self._pending.append((parsed, token_ids, logprobs))
        if len(self.kept_text) < self._kept_chars:
            self.kept_text = (self.kept_text + piece.raw)[: self._kept_chars]
        self.num_tokens += len(token_ids)
        self.stop_string = piece.stop
        self.ended_by_text = piece.is_last


def append_chunk(output: inference_pb2.Chunk, chunk: inference_pb2.Chunk) -> None:
    """Adds a chunk to the answer before it, of whose calls each makes one part."""
    output.text += chunk.text
    output.reasoning += chunk.reasoning
    output.token_ids.extend(chunk.token_ids)
    output.logprobs.extend(chunk.logprobs)
    for part in chunk.tool_calls:
        if part.index < len(output.tool_calls):
            output.tool_calls[part.index].arguments += part.arguments
        else:
            output.tool_calls.append(part)


class Answer:
    """Holds the answer to one request. Iterate over it, or call `pass_on`, once.

    Its events are PromptInfo, PromptLogprobs if asked for, Chunks and a Completion for each output, or the error that
    ended it; and LiveProgress, for whoever iterates, where `progress_after_s` is set.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        token_ids: Sequence[int],
        *,
        request_id: str,
        model_id: str,
        tokenizer: Tokenizer,
        tokenize_ms: float | None,
        kept_chars: int = 0,
        echoed: str = "",
        **text: Any,
    ) -> None:
        """`request_id` is what the client calls it; `token_ids` is the prompt that the workers compute. `kept_chars` is
        how much of the text `kept_text` may have. `echoed` is the prompt's text, if it is to be echoed. `text` are
        further parameters of TextStream."""
        self._request = request
        self._tokenize_ms = tokenize_ms
        self._outputs = [
            Output(
                index,
                request,
                tokenizer,
                kept_chars=kept_chars,
                echoed=echoed,
                prompt=token_ids[-CONTEXT_TOKENS:],
                **text,
            )
            for index in range(num_answers(request))
        ]
        self._turns = collections.deque(self._outputs)
        """The outputs, the next to be looked at first."""
        self._info = inference_pb2.PromptInfo(
            request_id=request_id,
            model=model_id,
            prompt_tokens=len(token_ids),
            token_ids=token_ids if request.response.echo_token_ids else (),
        )
        self._announced = False
        self._was_started = False
        self._num_cached_tokens = 0
        self._scored: collections.deque[inference_pb2.PromptLogprobs] = collections.deque()
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self._pass_on: Callable[[], None] | None = None
        """Passes on what has come, in its turn."""
        self._over = asyncio.Event()
        self.num_output_tokens = 0
        """Tokens of all outputs."""
        self.progress: Callable[[], LiveProgress | None] = lambda: None
        """Returns where the request is; None once it has ended."""
        self.progress_after_s: float | None = None
        """Seconds without an event after which the client is told its progress; None for never."""

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def usage(self) -> TokenUsage:
        """Returns which tokens are charged: none until a worker has begun, then the prompt's and all outputs'."""
        if not self._was_started:
            return TokenUsage()
        return TokenUsage(self._info.prompt_tokens, self._num_cached_tokens, self.num_output_tokens)

    @property
    def num_waiting_tokens(self) -> int:
        """Returns how many tokens the client has not taken yet."""
        return sum(output.num_waiting_tokens for output in self._outputs)

    @property
    def kept_text(self) -> str:
        """Returns the beginning of the first output's text."""
        return self._outputs[0].kept_text

    @property
    def reason(self) -> FinishReason:
        """Returns why it ended: for length, if one of several outputs did."""
        reasons = {output.reason for output in self._outputs}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    # What the coordinator emits

    def started(self, action: EmitStarted) -> None:
        self._info.prefill_worker = action.prefill_worker
        self._info.cached_tokens = self._num_cached_tokens = action.cached_tokens
        self._announced = self._was_started = True
        self._came()

    def prompt_scored(self, action: EmitPromptTokens) -> None:
        most = max(1, _MAX_PART_ENTRIES // (1 + self._request.response.prompt_logprobs))
        for start in range(0, len(action.logprobs), most):
            part = action.logprobs[start : start + most]
            self._scored.append(inference_pb2.PromptLogprobs(position=action.position + start, logprobs=part))
        self._came()

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[Any], index: int = 0, *, is_stopped: bool = False
    ) -> bool:
        """Adds tokens of the output with that index, of which the last may be a stop token. Returns True if its text
        ends with them."""
        output = self._outputs[index]
        num_before = output.num_tokens
        ended = output.push(token_ids, logprobs, is_stopped=is_stopped)
        self.num_output_tokens += output.num_tokens - num_before
        self._came()
        return ended

    def finished(self, action: EmitFinished) -> None:
        """Ends an output. The prompt's tokens are in the usage of the first one only: together they count once."""
        completion, summary = self._outputs[action.index].finish(action), action.summary
        self._num_cached_tokens = summary.cached_tokens  # where the request was placed again, that of the last time
        if not action.index:
            completion.usage.prompt_tokens = self._info.prompt_tokens
            completion.usage.cached_tokens = summary.cached_tokens
        completion.workers.prefill = summary.prefill_worker
        completion.workers.decode = summary.decode_worker
        completion.workers.retries = summary.num_retries
        completion.timings.CopyFrom(timings_of(summary, self._tokenize_ms))
        if action.is_last:
            self._over.set()
        self._came()

    def failed(self, error: BatonError) -> None:
        self._error = error
        self._over.set()
        self._came()

    def _came(self) -> None:
        """Tells whoever takes the events that there are more."""
        self._changed.set()
        if self._pass_on is not None:
            self._pass_on()

    # What the fronts send

    async def settled(self) -> None:
        """Waits until the request is over, even if the client has not taken all of the answer.

        Raises the error that ended it.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def pass_on(self, take: Callable[[AnswerEvent], None], room: Room) -> None:
        """Gives each event to `take` in the turn in which it comes, while there is room; the others are kept.

        Returns when all was taken. Raises the error that ended the answer, or what `take` raises.
        """
        over: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def pass_on() -> None:
            if over.done() or not room.is_there:
                return
            try:
                for event in self._events():
                    take(event)
                    if not room.is_there:
                        return
                if self._is_taken():
                    over.set_result(None)
            except Exception as error:
                over.set_result(error)

        self._pass_on = pass_on
        room.awaited.append(pass_on)
        try:
            pass_on()
            error = await over
        finally:
            self._pass_on = None
            room.awaited.remove(pass_on)
        if error is not None:
            raise error

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        while True:
            if self.progress_after_s is not None and not await self._changes_within(self.progress_after_s):
                if (progress := self.progress()) is not None:
                    yield progress
                continue
            await self._changed.wait()
            self._changed.clear()
            for event in self._events():
                yield event
                if isinstance(event, inference_pb2.PromptLogprobs):
                    await asyncio.sleep(0)  # others have their turns between the parts of a long prompt
            if not self._changed.is_set() and self._is_taken():  # else more arrived while the client took the chunks
                return

    def _events(self) -> Iterator[AnswerEvent]:
        """Yields what is there, and what comes meanwhile."""
        if self._announced:
            self._announced = False
            yield self._info
        while self._scored:
            yield self._scored.popleft()
        num_empty = 0
        while num_empty < len(self._turns):  # in turns, so that none waits for a client that is slow to take another
            self._turns.rotate(-1)
            if (event := self._turns[-1].take()) is not None:
                num_empty = 0
                yield event
            else:
                num_empty += 1

    def _is_taken(self) -> bool:
        """Returns whether the client has the whole answer. Raises the error that ended it."""
        if self._error is not None:
            raise self._error
        return self.over and all(output.taken for output in self._outputs)

    async def _changes_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


def skips_special_tokens(request: inference_pb2.GenerateRequest) -> bool:
    return request.response.skip_special_tokens or not request.response.HasField("skip_special_tokens")


def echoes_only(request: inference_pb2.GenerateRequest) -> bool:
    """Returns whether the answer is the prompt's text alone."""
    is_empty = request.stopping.HasField("max_tokens") and not request.stopping.max_tokens
    return request.response.echo_text and is_empty


def num_answers(request: inference_pb2.GenerateRequest) -> int:
    return request.n if request.HasField("n") else 1


def timings_of(summary: Summary, tokenize_ms: float | None = None) -> types_pb2.PhaseTimings:
    """Returns the time of each phase as the router measured it, or as a worker did, where one measured it."""
    timings = types_pb2.PhaseTimings(
        tokenize_ms=tokenize_ms,
        queue_ms=summary.queue_s * 1000,
        prefill_wait_ms=_ms(summary.prefill_wait_s),
        prefill_compute_ms=_ms(summary.prefill_compute_s),
        ttft_ms=_ms(summary.ttft_s),
        total_ms=summary.total_s * 1000,
    )
    for measured in summary.worker_timings:
        timings.MergeFrom(measured)
    return timings


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
