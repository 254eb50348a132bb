"""One request's answer on its way to the client: what the coordinator emits goes in, what the RPC sends comes out.

Owns: the text made of the tokens, and a buffer that coalesces what a slow client has not taken; it is bounded by
max_tokens, so no one ever waits for a client. Never: gRPC, or what happens to the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import BatonError
from services.router.coordinator.actions import EmitFinished, EmitStarted, Summary
from services.router.streaming import Piece, TextStream
from services.router.wire import FINISH_REASONS

Event = inference_pb2.PromptInfo | inference_pb2.Chunk | inference_pb2.Completion


@dataclass(slots=True)
class _Pending:
    """What the client has not taken yet."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def chunk(self) -> inference_pb2.Chunk:
        return inference_pb2.Chunk(text="".join(self.text), token_ids=self.token_ids, logprobs=self.logprobs)


class Answer:
    """Iterate over it once: PromptInfo, Chunks, Completion; or it raises the error that ended the request."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        token_ids: Sequence[int],
        *,
        model_id: str,
        tokenizer: Tokenizer,
        tokenize_ms: float | None,
    ) -> None:
        """`request` has its id; `token_ids` is the prompt as it runs."""
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
        """Those that belong to the output; a stop string may cut off some that were received."""
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
        """True if they complete a stop string. What comes after that is ignored."""
        if self.stop_string is not None:
            return False
        piece = self._text.push(token_ids)
        self._pending.token_ids.extend(token_ids[: piece.num_tokens])
        self._pending.logprobs.extend(logprobs[: piece.num_tokens])
        self.num_output_tokens += piece.num_tokens
        return self._take(piece)

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
        """Waits until the request is over, however much of its answer was taken. Raises the error that ended it."""
        await self._over.wait()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._announced:
                self._announced = False
                yield self._info
            pending, self._pending = self._pending, _Pending()
            if pending.token_ids or pending.text:
                yield pending.chunk()
            if self._changed.is_set():
                continue  # more came while the client took that
            if self._error is not None:
                raise self._error
            if self._completion is not None:
                yield self._completion
                return

    def _take(self, piece: Piece) -> bool:
        if piece.text:
            self._pending.text.append(piece.text)
        self.stop_string = piece.stop
        self._changed.set()
        return piece.stop is not None


def timings_of(summary: Summary, tokenize_ms: float | None = None) -> types_pb2.PhaseTimings:
    """The router's own figures; what workers measured themselves replaces what it saw of them."""
    timings = types_pb2.PhaseTimings(
        tokenize_ms=tokenize_ms,
        queue_ms=summary.queue_s * 1000,
        prefill_wait_ms=_ms(summary.prefill_wait_s),
        prefill_compute_ms=_ms(summary.prefill_compute_s),
        ttft_ms=_ms(summary.ttft_s),
        total_ms=summary.total_s * 1000,
    )
    for measured in summary.worker_timings:
        assert isinstance(measured, types_pb2.PhaseTimings)
        timings.MergeFrom(measured)
    return timings


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
