"""Takes requests in, whatever protocol brought them: validates, tokenises, submits.

Owns: what happens between a GenerateRequest and its Answer. There is one such way, so that admission, traces and
metrics are the same for all. Never: gRPC or HTTP, or what becomes of a request once it is submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from baton.v1 import inference_pb2, types_pb2
from services.core.clock import Clock
from services.core.config import DAY_S
from services.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded
from services.core.hashing import ShortHash, block_hashes, short_hashes
from services.core.ids import new_request_id, new_seed
from services.router.answer import Answer
from services.router.catalogue import ServedModel
from services.router.coordinator.events import ExpectedRequest, RequestSpec
from services.router.front.byte_budget import RETRY_AFTER_S
from services.router.front.call import Call
from services.router.front.validation import (
    check_fits_one_message,
    check_token_ids,
    utf8_bytes,
    validate,
)
from services.router.telemetry.request_metrics import RequestMetrics, RequestRecord
from services.router.telemetry.tracing import RequestTrace
from services.router.text.tokenisation import too_long
from services.rpc.logging import ids
from services.rpc.telemetry import Tracer

log = logging.getLogger(__name__)

# Tokenising a prompt of at most this many characters costs less than sending it to another thread.
_INLINE_CHARS = 512
_INLINE_TOKENS = 1024

# Bounds for a prompt that is written to the log.
MAX_LOGGED_CHARS = 2048
MAX_LOGGED_IDS = 512
_MESSAGE_CHARS = 32  # for a message's role and the brackets


class Intake:
    def __init__(
        self,
        *,
        clock: Clock,
        tracer: Tracer,
        metrics: RequestMetrics,
        log_prompts: bool = False,
    ) -> None:
        self._clock = clock
        self._tracer = tracer
        self._metrics = metrics
        self._log_prompts = log_prompts

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Yields the request's answer. Leaving the block early, as for a client that goes away, cancels the request.

        Fills in what the request leaves to the router.
        """
        incoming, model, timeout_s = call.incoming, call.model, call.timeout_s
        arrived_s = self._clock.now()
        record = model.metrics.begin(incoming.request, arrived_s)
        with self.refusals(record=record):
            validate(incoming.request, model.facts)
            if call.in_one_message:
                check_fits_one_message(incoming.request, model.context_tokens)
        _complete(incoming.request)
        trace = RequestTrace(
            self._tracer,
            incoming.request,
            model_id=model.model_id,
            parent=call.caller.traceparent,
            stream=call.stream,
            arrived_s=arrived_s,
        )
        if self._log_prompts:
            about = ids(incoming.request.request_id, trace.traceparent)
            log.info("prompt: %s", _prompt(incoming.request), extra=about)
        with self.refusals(trace, record):
            deadline_s = None if timeout_s is None else arrived_s + min(timeout_s, DAY_S)
            answer = await self._submit(call, trace, record, deadline_s)
        try:
            yield answer
        finally:
            model.conductor.cancel(incoming.request.request_id, answer)

    async def _submit(
        self,
        call: Call,
        trace: RequestTrace,
        record: RequestRecord,
        deadline_s: float | None,
    ) -> Answer:
        incoming, model = call.incoming, call.model
        started_s = self._clock.now()
        token_ids = await self._tokenise(model, incoming.request, deadline_s)
        if not token_ids:
            raise InvalidRequest("prompt", "has no tokens")
        hashes = await _hashed(model, incoming.request, token_ids)
        incoming.tokenised(len(token_ids))
        request = incoming.request
        ended_s = self._clock.now()
        trace.tokenized(started_s, ended_s, len(token_ids))
        answer = Answer(
            request,
            token_ids,
            model_id=model.model_id,
            tokenizer=model.text.tokenizer,
            tokenize_ms=(ended_s - started_s) * 1000,
        )
        spec = RequestSpec(
            request_id=request.request_id,
            token_ids=tuple(token_ids),
            max_tokens=request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None,
            priority=request.priority,
            deadline_s=deadline_s,
            cache_salt=request.cache_salt,
            block_hashes=hashes,
            conversation=request.session,
            tenant=call.caller.tenant,
            model=model.model_id,
            min_tokens=_fewest_tokens(request.stopping),
            payload=request,
        )
        record.asked(len(token_ids), spec.max_tokens, spec.priority)
        model.conductor.submit(spec, answer, trace, record)
        return answer

    async def _tokenise(
        self, model: ServedModel, request: inference_pb2.GenerateRequest, deadline_s: float | None
    ) -> list[int]:
        """Returns the prompt's token ids.

        A short text is tokenised on the event loop, if the tokenizer is trusted; all others, and messages, which always
        render a template, on a thread.
        """
        text, context_tokens = model.text, model.context_tokens
        most_tokens = None if request.truncate_prompt else context_tokens
        match request.WhichOneof("prompt"):
            case "token_ids":
                return _given_ids(model, request)
            case "text":
                text.check_length("text", request.text, most_tokens)
                if len(request.text) <= _INLINE_CHARS and text.is_trusted:
                    token_ids = text.encode_text(request.text, most_tokens)
                else:
                    work = functools.partial(text.encode_text, request.text, most_tokens)
                    fewest_tokens = text.bound.fewest_tokens(request.text) if text.bound is not None else 1
                    num_bytes = utf8_bytes([request.text])
                    token_ids = await self._in_line(
                        model, request, num_bytes, work, deadline_s, fewest_tokens=fewest_tokens
                    )
            case _:
                messages = [{"role": entry.role, "content": entry.content} for entry in request.messages.messages]
                num_bytes = utf8_bytes(entry["content"] for entry in messages)
                work = functools.partial(text.encode_messages, messages, most_tokens)
                token_ids = await self._in_line(model, request, num_bytes, work, deadline_s)
        return token_ids[-_room(request, context_tokens) :] if request.truncate_prompt else token_ids

    async def _in_line(
        self,
        model: ServedModel,
        request: inference_pb2.GenerateRequest,
        num_bytes: int,
        work: Callable[[], list[int]],
        deadline_s: float | None,
        *,
        fewest_tokens: int = 1,
    ) -> list[int]:
        """Waits for the tokenizer, at most until the request's deadline, and as long as a request may be queued.

        Meanwhile the request has a place in the queue.
        """
        coordinator, now = model.conductor.coordinator, self._clock.now()
        stopping = request.stopping
        coordinator.expect(
            ExpectedRequest(
                fewest_tokens=min(fewest_tokens, model.context_tokens - 1),
                tokenise_s=model.line.wait_s(num_bytes),
                max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
                priority=request.priority,
                deadline_s=deadline_s,
                min_tokens=_fewest_tokens(stopping),
            ),
            now,
        )
        late: BatonError = Overloaded("the prompt was not tokenised in time", retry_after_s=RETRY_AFTER_S)
        limit_s = coordinator.queue_timeout_s
        if deadline_s is not None and deadline_s - now < limit_s:
            limit_s, late = deadline_s - now, DeadlineExceeded("the deadline passed before the prompt was tokenised")
        try:
            async with asyncio.timeout(limit_s):
                return await model.line.run(num_bytes, work)
        except TimeoutError as error:
            raise late from error
        finally:
            coordinator.arrived()

    @contextlib.contextmanager
    def refusals(self, trace: RequestTrace | None = None, record: RequestRecord | None = None) -> Iterator[None]:
        """Counts requests that fail before the coordinator has them, and ends their traces."""
        try:
            yield
        except BaseException as error:
            if record is not None:
                record.failed(error, self._clock.now())
            else:  # the request could not even be read, or names no model
                self._metrics.failed(error)
            if trace is not None:
                trace.failed(error, self._clock.now())
            raise


async def _hashed(
    model: ServedModel, request: inference_pb2.GenerateRequest, token_ids: list[int]
) -> Mapping[int, tuple[ShortHash, ...]]:
    """Returns the short hashes of the prompt's full blocks for each size of blocks that policy looks at.

    Those of a long prompt are made on a thread: 32,000 tokens take some milliseconds.
    """
    sizes = model.conductor.coordinator.block_sizes_to_hash()
    if not sizes:
        return {}

    def work() -> dict[int, tuple[ShortHash, ...]]:
        return {size: short_hashes(block_hashes(token_ids, size, request.cache_salt)) for size in sizes}

    return work() if len(token_ids) <= _INLINE_TOKENS else await asyncio.to_thread(work)


def _given_ids(model: ServedModel, request: inference_pb2.GenerateRequest) -> list[int]:
    """Returns the given ids. Checks their number first: a list that cannot fit is not walked through."""
    ids, context_tokens = request.token_ids.ids, model.context_tokens
    if len(ids) > context_tokens and not request.truncate_prompt:
        raise too_long(len(ids), context_tokens)
    kept = list(ids[-_room(request, context_tokens) :] if request.truncate_prompt else ids)
    check_token_ids(kept, model.facts)
    return kept


def _room(request: inference_pb2.GenerateRequest, context_tokens: int) -> int:
    """Returns how many tokens to keep of a prompt to be truncated: max_tokens, or one token, must still fit.

    It is at least 1, so that a max_tokens that cannot fit is refused with the same message as for any other request.
    """
    wanted = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else 1
    return max(1, context_tokens - wanted)


def _complete(request: inference_pb2.GenerateRequest) -> None:
    """Fills in what the request leaves to the router: its id and its seed."""
    if not request.HasField("request_id"):
        request.request_id = new_request_id()
    if not request.sampling.HasField("seed"):
        request.sampling.seed = new_seed()


def _prompt(request: inference_pb2.GenerateRequest) -> str:
    """Returns the prompt as one line for the log. Beyond the bounds it shows only how much is left out."""
    match request.WhichOneof("prompt"):
        case "text":
            shown, num_left = json.dumps(request.text[:MAX_LOGGED_CHARS], ensure_ascii=False), len(request.text)
        case "token_ids":
            ids_ = request.token_ids.ids
            return f"{list(ids_[:MAX_LOGGED_IDS])}{_rest(len(ids_) - MAX_LOGGED_IDS, 'ids')}"
        case _:
            room, messages = MAX_LOGGED_CHARS, []
            for entry in request.messages.messages:
                if room > 0:
                    messages.append({"role": entry.role, "content": entry.content[:room]})
                room -= len(entry.content) + _MESSAGE_CHARS
            shown, num_left = json.dumps(messages, ensure_ascii=False), MAX_LOGGED_CHARS - room
    return shown + _rest(num_left - MAX_LOGGED_CHARS, "characters")


def _rest(count: int, of: str) -> str:
    return f" and {count} {of} more" if count > 0 else ""


def _fewest_tokens(stopping: types_pb2.StoppingParams) -> int:
    """Returns the fewest tokens that the output can have: max_tokens if nothing can end it earlier, else min_tokens."""
    endless = stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids
    return stopping.max_tokens if endless else stopping.min_tokens
