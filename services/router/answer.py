"""Holds one request's answer on its way to the client: the coordinator adds to it, and the RPC sends from it.

Owns: the text made from the tokens, and a buffer that merges what a slow client has not read; it is bounded by
max_tokens, so nothing ever waits for a client. The buffer is emptied in chunks of bounded size: gRPC clients accept no
message above 4 MiB unless configured to. Never: gRPC, or what happens to the request.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import BatonError
from services.router.coordinator.actions import EmitFinished, EmitStarted, Summary
from services.router.text.streaming import Piece, TextStream
from services.router.workers.wire import FINISH_REASONS

AnswerEvent = inference_pb2.PromptInfo | inference_pb2.Chunk | inference_pb2.Completion


MAX_CHUNK_TOKENS = 256
"""The most tokens in one chunk.

With 20 log-probabilities each they take 80 KB in a message, and as JSON less than 1 MB.
"""


@dataclass(slots=True)
class _Decoded:
    """Holds some tokens, few enough for a chunk, and the text that became certain with them."""

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Any] = ()


@dataclass(slots=True)
class _Pending:
    """Keeps the pieces that the client has not taken yet, in order."""

    pieces: collections.deque[_Decoded] = field(default_factory=collections.deque)

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces)

    def take(self) -> inference_pb2.Chunk | None:
        """Removes and returns the first pieces, as many as fit into a chunk; None if there are none."""
        if not self.pieces:
            return None
        chunk, text = inference_pb2.Chunk(), []
        while self.pieces and len(chunk.token_ids) + len(self.pieces[0].token_ids) <= MAX_CHUNK_TOKENS:
            piece = self.pieces.popleft()
            text.append(piece.text)
            chunk.token_ids.extend(piece.token_ids)
            chunk.logprobs.extend(piece.logprobs)
        chunk.text = "".join(text)
        return chunk


class Answer:
    """Holds the answer to one request. Iterate over it once.

    It yields PromptInfo, Chunks and Completion, or raises the error that ended the request.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        token_ids: Sequence[int],
        *,
        model_id: str,
        tokenizer: Tokenizer,
        tokenize_ms: float | None,
    ) -> None:
        """`request` has its id; `token_ids` is the prompt that the workers compute."""
        self._request = request
        self._tokenize_ms = tokenize_ms
        self._text = TextStream(
            tokenizer,
            skip_special_tokens=request.response.skip_special_tokens
            if request.response.HasField("skip_special_tokens")
            else True,
            stops=request.stopping.stop,
        )
        self._info = inference_pb2.PromptInfo(
            request_id=request.request_id,
            model=model_id,
            prompt_tokens=len(token_ids),
            token_ids=token_ids if request.response.echo_token_ids else (),
        )
        self._announced = False
        self._pending = _Pending()
        self._completion: inference_pb2.Completion | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self.num_output_tokens = 0
        """Tokens that belong to the output; a stop string may cut off some that were received."""
        self.stop_string: str | None = None

    @property
    def over(self) -> bool:
        return self._completion is not None or self._error is not None

    # What the coordinator emits

    def started(self, action: EmitStarted) -> None:
        self._info.prefill_worker = action.prefill_worker
        self._info.cached_tokens = action.cached_tokens
        self._announced = True
        self._changed.set()

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        """Adds output tokens. Returns True if they complete a stop string; tokens after it are ignored."""
        for start in range(0, len(token_ids), MAX_CHUNK_TOKENS):
            if self.stop_string is not None:
                break
            part = token_ids[start : start + MAX_CHUNK_TOKENS]
            piece = self._text.push(part)
            self._take(piece, part[: piece.num_tokens], logprobs[start : start + piece.num_tokens])
            if piece.stop is not None:
                return True
        return False

    def finished(self, action: EmitFinished) -> None:
        if self.stop_string is None:
            self._take(self._text.flush())
        completion = inference_pb2.Completion(finish_reason=FINISH_REASONS[action.reason])
        if self.stop_string is not None:
            completion.finish_reason = types_pb2.FINISH_REASON_STOP
            completion.stop_string = self.stop_string
        elif action.stop_token_id is not None:
            completion.stop_token_id = action.stop_token_id
        summary = action.summary
        completion.usage.prompt_tokens = self._info.prompt_tokens
        completion.usage.output_tokens = self.num_output_tokens
        completion.usage.cached_tokens = summary.cached_tokens
        completion.workers.prefill = summary.prefill_worker
        completion.workers.decode = summary.decode_worker
        completion.workers.retries = summary.num_retries
        completion.timings.CopyFrom(timings_of(summary, self._tokenize_ms))
        self._completion = completion
        self._changed.set()
        self._over.set()

    def failed(self, error: BatonError) -> None:
        self._error = error
        self._changed.set()
        self._over.set()

    # What the RPC sends

    async def settled(self) -> None:
        """Waits until the request is over, even if the client has not taken all of the answer.

        Raises the error that ended it.
        """
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._announced:
                self._announced = False
                yield self._info
            while (chunk := self._pending.take()) is not None:
                yield chunk
            if self._changed.is_set():
                continue  # more arrived while the client took the chunks
            if self._error is not None:
                raise self._error
            if self._completion is not None:
                yield self._completion
                return

    def _take(self, piece: Piece, token_ids: Sequence[int] = (), logprobs: Sequence[Any] = ()) -> None:
        if piece.text or token_ids:
            self._pending.pieces.append(_Decoded(piece.text, token_ids, logprobs))
        self.num_output_tokens += len(token_ids)
        self.stop_string = piece.stop
        self._changed.set()


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
