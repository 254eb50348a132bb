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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.v1 import inference_pb2, types_pb2
from services.core.clock import Clock
from services.core.config import DAY_S
from services.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded
from services.core.hashing import ShortHash, block_hashes, salt_in, short_hashes
from services.core.ids import new_request_id, new_seed
from services.router.answer import Answer, echoes_only, num_answers, skips_special_tokens
from services.router.catalogue import ServedModel
from services.router.coordinator.events import ExpectedRequest, RequestSpec
from services.router.front.call import RETRY_AFTER_S, Call, Caller, Incoming
from services.router.front.validation import (
    check_fits_one_message,
    check_prompt_logprobs,
    check_token_ids,
    constrain_output,
    messages_of,
    num_prompt_entries,
    output_form,
    tools_of,
    utf8_bytes,
    validate,
    variables_of,
)
from services.router.telemetry.request_log import RequestDetails, RequestLog
from services.router.telemetry.request_metrics import RequestMetrics, RequestRecord
from services.router.telemetry.timelines import MOST_TEXT_CHARS, Timelines
from services.router.telemetry.tracing import RequestTrace, error_outcome
from services.router.telemetry.usage import RequestUsage
from services.router.tenants.gate import Gate, Visit
from services.router.tenants.tenant import Tenant, TokenUsage, allowed_output, demand_tokens_together
from services.router.text.chat import PromptEnd, text_bytes
from services.router.text.streaming import num_begun
from services.router.text.tokenisation import ModelText, too_long
from services.rpc.parameters import check_sampling
from services.rpc.telemetry import Tracer

log = logging.getLogger(__name__)
T = TypeVar("T")

# Tokenising a prompt of at most this many characters costs less than sending it to another thread.
_INLINE_CHARS = 512
_INLINE_TOKENS = 1024

MAX_LOGGED_CHARS = 2048
"""How much of a prompt is written to the log."""
_ID_CHARS = 4  # for which a token id counts
_MESSAGE_CHARS = 32  # for a message's role and the brackets

_MOST_ID_CHARS = 256
"""How much is kept of a refused request's id, which may be refused for its length."""
_MOST_FAILURE_CHARS = 500


@dataclass(slots=True)
class _Bill:
    """Holds what is known so far of what one request is charged."""

    request_id: str
    details: RequestDetails
    tokens: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True, slots=True)
class _Echo:
    """Is the text of a prompt that is echoed."""

    text: str
    begins_in_prompt: bool
    """Whether a character that is begun in the prompt belongs to the output's text."""


class Intake:
    def __init__(
        self,
        *,
        clock: Clock,
        tracer: Tracer,
        metrics: RequestMetrics,
        timelines: Timelines,
        gate: Gate,
        log_prompts: bool = False,
        usage_sinks: Sequence[Callable[[RequestUsage], None]] = (),
        request_log: RequestLog | None = None,
    ) -> None:
        """Each of `usage_sinks`, and the request log, is told what a request is charged, once for each request that has
        ended."""
        self._clock = clock
        self._tracer = tracer
        self._metrics = metrics
        self._timelines = timelines
        self._gate = gate
        self._log_prompts = log_prompts
        self._usage_sinks = usage_sinks
        self._request_log = request_log

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """Yields the request's answer. Leaving the block early, as for a client that goes away, cancels the request.

        Fills in what the request leaves to the router.
        """
        incoming, model, timeout_s = call.incoming, call.model, call.timeout_s
        tenant = call.caller.tenant
        arrived_s = self._clock.now()
        record = model.metrics.begin(incoming.request, arrived_s)
        with contextlib.ExitStack() as stack:
            bill = stack.enter_context(self._billed(call, record, arrived_s))
            with self.refusals(record=record):
                party = call.together.party if call.together is not None else None
                visit = stack.enter_context(self._gate.visit(tenant, party))
                validate(incoming.request, model.facts)
                if call.in_one_message:
                    check_fits_one_message(incoming.request, model.context_tokens)
                _prioritise(incoming.request, tenant)
            bill.request_id = own_id = _complete(incoming.request, tenant)
            trace = RequestTrace(
                self._tracer,
                incoming.request,
                model_id=model.model_id,
                parent=call.caller.traceparent,
                stream=call.stream,
                arrived_s=arrived_s,
                timelines=self._timelines,
                times=record.times,
                tenant=tenant,
            )
            trace.timeline.max_tokens = _max_tokens(incoming.request)
            bill.details.timeline = trace.timeline
            if text_chars := self._logged_chars(tenant):
                bill.details.prompt = _shown_prompt(incoming.request, text_chars)[0]
            if self._shows_prompts(tenant):
                trace.timeline.text_chars = MOST_TEXT_CHARS
                prompt = logged_prompt(incoming.request)
                trace.timeline.prompt = prompt[:MOST_TEXT_CHARS]
                log.info("prompt: %s", prompt, extra=trace.log_ids)
            with self.refusals(trace, record):
                deadline_s = None if timeout_s is None else arrived_s + min(timeout_s, DAY_S)
                answer = await self._submit(call, visit, own_id, trace, record, deadline_s)
            try:
                yield answer
            finally:
                model.conductor.cancel(trace.timeline.request_id, answer)
                bill.tokens = answer.usage
                if text_chars:
                    bill.details.answer = answer.kept_text[:text_chars]
                visit.num_used = bill.tokens.total

    @contextlib.contextmanager
    def _billed(self, call: Call, record: RequestRecord, arrived_s: float) -> Iterator[_Bill]:
        """Tells what a request is charged when the block ends, however it does: by then its record knows how."""
        tenant = call.caller.tenant
        # Nothing here keeps the request itself: once it is tokenised, a smaller one takes its place.
        details = RequestDetails(call.caller.front, call.stream)
        bill = _Bill(call.incoming.request.request_id[:_MOST_ID_CHARS], details)
        try:
            yield bill
        except BatonError as error:
            details.failure = str(error)[:_MOST_FAILURE_CHARS]
            raise
        finally:
            cost = tenant.prices.cost(bill.tokens)
            details.duration_s = self._clock.now() - arrived_s
            self._tell(
                RequestUsage(tenant.name, call.model.model_id, bill.request_id, bill.tokens, cost, record.outcome),
                details,
            )

    def _tell(self, usage: RequestUsage, details: RequestDetails) -> None:
        for sink in self._usage_sinks:
            sink(usage)
        if self._request_log is not None:
            self._request_log.ended(usage, details)

    def _shows_prompts(self, tenant: Tenant) -> bool:
        return self._log_prompts and tenant.logs_prompts

    def _logged_chars(self, tenant: Tenant) -> int:
        """Returns how much of a prompt, and of an answer, the request log may have."""
        return self._request_log.text_chars if self._request_log is not None and tenant.logs_prompts else 0

    async def _submit(
        self,
        call: Call,
        visit: Visit,
        own_id: str,
        trace: RequestTrace,
        record: RequestRecord,
        deadline_s: float | None,
    ) -> Answer:
        """Submits a request, whose client calls it `own_id`."""
        incoming, model, tenant = call.incoming, call.model, call.caller.tenant
        started_s = self._clock.now()
        token_ids = await self._tokenise(model, incoming.request, deadline_s, tenant)
        if not token_ids:
            raise InvalidRequest("prompt", "has no tokens")
        await self._tokenise_bad_words(model, incoming.request, deadline_s, tenant)
        check_prompt_logprobs(incoming.request, len(token_ids))
        num_tokens = _bound_output(incoming, tenant, len(token_ids), model.context_tokens)
        if call.together is None:
            visit.reserve(num_tokens)
        else:
            call.together.num_tokens += num_tokens
            await call.together.wait()
            demand_tokens_together(tenant, call.together.num_tokens)
            visit.reserve(num_tokens, call.together.num_tokens)
            await call.together.wait()  # so that none begins if one is refused
        if call.in_one_message:
            check_fits_one_message(incoming.request, model.context_tokens, len(token_ids))
        cache_salt = tenant.salt(incoming.request.cache_salt)
        epoch = model.conductor.coordinator.verdicts.epoch
        hashes = await _hashed(model, incoming.request, token_ids, salt_in(epoch, cache_salt))
        form = output_form(incoming.request, model.facts.forms, is_thinking=model.text.is_thinking(token_ids))
        constrain_output(incoming.request, form, model.facts.forms, model.text.special_ids)
        echoed = _echoed(model, incoming.request, token_ids)
        incoming.tokenised(len(token_ids), num_prompt_entries(incoming.request, len(token_ids)))
        request = incoming.request
        ended_s = self._clock.now()
        trace.tokenized(started_s, ended_s, len(token_ids))
        answer = Answer(
            request,
            token_ids,
            request_id=own_id,
            model_id=model.model_id,
            tokenizer=model.text.tokenizer,
            tokenize_ms=(ended_s - started_s) * 1000,
            kept_chars=max(trace.timeline.text_chars, self._logged_chars(tenant)),
            echoed=echoed.text,
            form=form,
            special_ids=model.text.special_ids,
            special_texts=model.token_texts.special,
            begins_in_prompt=echoed.begins_in_prompt,
        )
        answer.progress = lambda: model.conductor.coordinator.progress_of(trace.timeline.request_id, self._clock.now())
        spec = RequestSpec(
            request_id=trace.timeline.request_id,
            token_ids=tuple(token_ids),
            max_tokens=_max_tokens(request),
            priority=request.priority,
            deadline_s=deadline_s,
            cache_salt=cache_salt,
            epoch=epoch,
            block_hashes=hashes,
            conversation=request.session,
            tenant=tenant.name,
            weight=tenant.weight,
            model=model.model_id,
            min_tokens=_fewest_tokens(request.stopping),
            scores_prompt=request.response.HasField("prompt_logprobs"),
            num_answers=num_answers(request),
            label=request.request_id,
            payload=request,
        )
        record.asked(len(token_ids), spec.max_tokens, spec.priority)
        model.conductor.submit(spec, answer, trace, record)
        return answer

    async def _tokenise(
        self, model: ServedModel, request: inference_pb2.GenerateRequest, deadline_s: float | None, tenant: Tenant
    ) -> list[int]:
        """Returns the prompt's token ids.

        A short text is tokenised on the event loop; all others, and messages, which always render a template, on a
        thread.
        """
        text, context_tokens = model.text, model.context_tokens
        keeps = _kept_tokens(request, context_tokens)
        most_tokens = context_tokens if keeps is None else None
        match request.WhichOneof("prompt"):
            case "token_ids":
                return _given_ids(model, request)
            case "text":
                text.check_length("text", request.text, most_tokens)
                if len(request.text) <= _INLINE_CHARS:
                    token_ids = text.encode_text(request.text, most_tokens, special=_adds_special_tokens(request))
                else:
                    num_bytes, work = encoding(text, request, most_tokens)
                    fewest_tokens = text.bound.fewest_tokens(request.text) if text.bound is not None else 1
                    token_ids = await self._in_line(
                        model, request, num_bytes, work, deadline_s, tenant, fewest_tokens=fewest_tokens
                    )
            case _:
                num_bytes, work = encoding(text, request, most_tokens)
                token_ids = await self._in_line(model, request, num_bytes, work, deadline_s, tenant)
        if keeps is not None:
            token_ids = token_ids[-keeps:]
            if len(token_ids) > context_tokens:
                raise too_long(len(token_ids), context_tokens)
        return token_ids

    async def _tokenise_bad_words(
        self, model: ServedModel, request: inference_pb2.GenerateRequest, deadline_s: float | None, tenant: Tenant
    ) -> None:
        """Replaces the bad words by their tokens, which workers know."""
        sampling = request.sampling
        if not sampling.bad_words:
            return
        work = functools.partial(model.text.bad_sequences, list(sampling.bad_words))
        num_bytes = utf8_bytes(sampling.bad_words)
        for sequence in await self._in_line(model, request, num_bytes, work, deadline_s, tenant):
            sampling.bad_token_ids.add(token_ids=sequence)
        sampling.ClearField("bad_words")
        check_sampling(sampling, model.facts.vocab_size)

    async def _in_line(
        self,
        model: ServedModel,
        request: inference_pb2.GenerateRequest,
        num_bytes: int,
        work: Callable[[], T],
        deadline_s: float | None,
        tenant: Tenant,
        *,
        fewest_tokens: int = 1,
    ) -> T:
        """Waits for the tokenizer, at most until the request's deadline, and as long as a request may be queued.

        Meanwhile the request has a place in the queue.
        """
        coordinator, now = model.conductor.coordinator, self._clock.now()
        stopping = request.stopping
        place = coordinator.expect(
            ExpectedRequest(
                fewest_tokens=min(fewest_tokens, model.context_tokens - 1),
                tokenise_s=model.line.wait_s(num_bytes),
                max_tokens=_max_tokens(request),
                priority=request.priority,
                deadline_s=deadline_s,
                min_tokens=_fewest_tokens(stopping),
                tenant=tenant.name,
                weight=tenant.weight,
            ),
            now,
        )
        late: BatonError = Overloaded("the prompt was not tokenised in time", retry_after_s=RETRY_AFTER_S)
        limit_s = coordinator.config.queue_timeout_s
        if deadline_s is not None and deadline_s - now < limit_s:
            limit_s, late = deadline_s - now, DeadlineExceeded("the deadline passed before the prompt was tokenised")
        try:
            async with asyncio.timeout(limit_s):
                return await model.line.run(num_bytes, work)
        except TimeoutError as error:
            raise late from error
        finally:
            coordinator.arrived(place)

    @contextlib.contextmanager
    def refusals(
        self,
        trace: RequestTrace | None = None,
        record: RequestRecord | None = None,
        *,
        caller: Caller | None = None,
        request_id: str = "",
    ) -> Iterator[None]:
        """Counts requests that fail before the coordinator has them, and ends their traces.

        A front that has no record yet, but knows whose request it is, names the caller and the client's id.
        """
        try:
            yield
        except BaseException as error:
            if record is not None:
                record.failed(error, self._clock.now())
            else:  # the request could not even be read, or names no model
                self._metrics.failed(error)
            if caller is not None:
                told = str(error)[:_MOST_FAILURE_CHARS] if isinstance(error, BatonError) else ""
                self._tell(
                    RequestUsage(
                        caller.tenant.name,
                        "",
                        request_id[:_MOST_ID_CHARS],
                        TokenUsage(),
                        0.0,
                        error_outcome(error),
                    ),
                    RequestDetails(caller.front, failure=told),
                )
            if trace is not None:
                trace.failed(error, self._clock.now())
            raise


def encoding(
    text: ModelText, request: inference_pb2.GenerateRequest, most_tokens: int | None = None
) -> tuple[int, Callable[[], list[int]]]:
    """Returns how many bytes a prompt of text or messages has, and what makes tokens of it, on a thread."""
    special = _adds_special_tokens(request)
    if request.WhichOneof("prompt") == "text":
        return utf8_bytes([request.text]), functools.partial(
            text.encode_text, request.text, most_tokens, special=special
        )
    messages, tools, chat = messages_of(request), tools_of(request), request.messages
    num_bytes = text_bytes(messages) + text_bytes(tools)
    return num_bytes, functools.partial(
        text.encode_messages,
        messages,
        most_tokens,
        tools=tools,
        variables=variables_of(chat),
        special=special,
        ending=_ending(chat),
    )


def _adds_special_tokens(request: inference_pb2.GenerateRequest) -> bool:
    """Returns whether the model's special tokens are added: by default to a text, and not to messages, whose template
    has them."""
    if request.HasField("add_special_tokens"):
        return bool(request.add_special_tokens)
    return bool(request.WhichOneof("prompt") == "text")


def _ending(chat: inference_pb2.ChatMessages) -> PromptEnd:
    if chat.continue_final_message:
        return PromptEnd.FINAL_MESSAGE
    opens_answer = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
    return PromptEnd.OPEN_ANSWER if opens_answer else PromptEnd.MESSAGES


def _echoed(model: ServedModel, request: inference_pb2.GenerateRequest, token_ids: list[int]) -> _Echo:
    """Returns the prompt's text, if it is to be echoed. A character that the output completes belongs to that."""
    if not request.response.echo_text:
        return _Echo("", begins_in_prompt=False)
    if request.WhichOneof("prompt") == "text" and _kept_tokens(request, model.context_tokens) is None:
        return _Echo(request.text, begins_in_prompt=False)
    num_whole = len(token_ids)
    if not echoes_only(request):
        num_whole -= num_begun(model.text.tokenizer, token_ids)
    text = model.token_texts.join(token_ids[:num_whole], with_special=not skips_special_tokens(request))
    return _Echo(text, begins_in_prompt=True)


async def _hashed(
    model: ServedModel, request: inference_pb2.GenerateRequest, token_ids: list[int], cache_salt: str
) -> Mapping[int, tuple[ShortHash, ...]]:
    """Returns the short hashes of the prompt's full blocks for each size of blocks that policy looks at; none of a
    prompt that is to be scored, which uses no cache.

    Those of a long prompt are made on a thread: 32,000 tokens take some milliseconds.
    """
    sizes = model.conductor.coordinator.block_sizes_to_hash()
    if not sizes or request.response.HasField("prompt_logprobs"):
        return {}

    def work() -> dict[int, tuple[ShortHash, ...]]:
        return {size: short_hashes(block_hashes(token_ids, size, cache_salt)) for size in sizes}

    return work() if len(token_ids) <= _INLINE_TOKENS else await asyncio.to_thread(work)


def _given_ids(model: ServedModel, request: inference_pb2.GenerateRequest) -> list[int]:
    """Returns the given ids. Checks their number first: a list that cannot fit is not walked through."""
    ids, context_tokens = request.token_ids.ids, model.context_tokens
    keeps = _kept_tokens(request, context_tokens)
    kept = ids if keeps is None else ids[-keeps:]
    if len(kept) > context_tokens:
        raise too_long(len(kept), context_tokens)
    check_token_ids(kept, model.facts)
    return list(kept)


def _kept_tokens(request: inference_pb2.GenerateRequest, context_tokens: int) -> int | None:
    """Returns how many of the prompt's last tokens to keep, None for all.

    With truncate_prompt max_tokens, or one token, must still fit. At least one is kept, so that a max_tokens that
    cannot fit is refused with the same message as for any other request.
    """
    limits = [request.truncate_prompt_tokens] if request.HasField("truncate_prompt_tokens") else []
    if request.truncate_prompt:
        limits.append(max(1, context_tokens - (_max_tokens(request) or 1)))
    return min(limits, default=None)


def _prioritise(request: inference_pb2.GenerateRequest, tenant: Tenant) -> None:
    """Gives the request a priority that its tenant may have. Raises InvalidRequest if it asks for another."""
    asked = request.priority if request.HasField("priority") else None
    if (priority := tenant.priority(asked)) != request.priority:
        request.priority = priority


def _bound_output(incoming: Incoming, tenant: Tenant, num_prompt_tokens: int, context_tokens: int) -> int:
    """Bounds the output if the tenant's tokens are counted. Returns how many tokens the prompt and the most that its
    answers can have are.

    Raises InvalidRequest for what the tenant may never have.
    """
    request = incoming.request
    max_tokens = allowed_output(
        tenant,
        num_prompt_tokens,
        _max_tokens(request),
        num_answers=num_answers(request),
        room=context_tokens - num_prompt_tokens,
        is_default=incoming.has_default_output,
    )
    if max_tokens is None:
        return num_prompt_tokens  # nothing counts it
    if request.stopping.min_tokens > max_tokens:
        raise InvalidRequest(
            "stopping.min_tokens", f"is {request.stopping.min_tokens}; tenant {tenant.name} may have {max_tokens}"
        )
    if not echoes_only(request):
        request.stopping.max_tokens = max_tokens
    return num_prompt_tokens + num_answers(request) * max_tokens


def _complete(request: inference_pb2.GenerateRequest, tenant: Tenant) -> str:
    """Fills in what the request leaves to the router, its id and its seed, and writes a top_p of 0 as what it means:
    greedy. Returns its id as the client knows it; from now on the request has the label by which operators find it."""
    own_id = request.request_id if request.HasField("request_id") else new_request_id()
    request.request_id = tenant.scoped(own_id)
    if not request.sampling.HasField("seed"):
        request.sampling.seed = new_seed()
    if request.sampling.HasField("top_p") and not request.sampling.top_p:
        request.sampling.temperature = 0.0
        request.sampling.ClearField("top_p")
    return own_id


def logged_prompt(request: inference_pb2.GenerateRequest) -> str:
    """Returns the prompt as one line for the log. Beyond the bounds it shows only how much is left out."""
    shown, num_left = _shown_prompt(request, MAX_LOGGED_CHARS)
    of = "ids" if request.WhichOneof("prompt") == "token_ids" else "characters"
    return json.dumps(shown, ensure_ascii=False) + (f" and {num_left} {of} more" if num_left > 0 else "")


def _shown_prompt(request: inference_pb2.GenerateRequest, most_chars: int) -> tuple[str | list[Any], int]:
    """Returns the beginning of the prompt, a text, token ids or messages, and how many characters or ids are left
    out."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text[:most_chars], len(request.text) - most_chars
        case "token_ids":
            ids_, most_ids = request.token_ids.ids, most_chars // _ID_CHARS
            return list(ids_[:most_ids]), len(ids_) - most_ids
    room, messages = most_chars, list[Any]()
    for entry in request.messages.messages:
        if room > 0:
            messages.append({"role": entry.role, "content": entry.content[:room]})
        room -= len(entry.content) + _MESSAGE_CHARS
    return messages, -room


def _max_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    """Returns the most tokens that workers are to make, where it is said: they make at least one."""
    return max(1, request.stopping.max_tokens) if request.stopping.HasField("max_tokens") else None


def _fewest_tokens(stopping: types_pb2.StoppingParams) -> int:
    """Returns the fewest tokens that the output can have: max_tokens if nothing can end it earlier, else min_tokens."""
    endless = stopping.ignore_eos and not stopping.stop and not stopping.stop_token_ids
    return stopping.max_tokens if endless else stopping.min_tokens
