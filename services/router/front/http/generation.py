"""Serves one HTTP call: its body becomes GenerateRequests, which are submitted as gRPC's are, and is answered.

The prompts of a call (mostly one) run side by side: each is a request of its own, and all are answered or none is.
Owns: their ids, and that the first failure, or a client that goes away, ends all of them on the workers at once. Never:
another queue, another validation or another trace than gRPC's; or what an endpoint's fields mean (completions.py,
chat.py, responses/).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.core.addresses import network_of
from services.core.errors import BatonError, InvalidKey, InvalidRequest, forget_frames
from services.router.answer import Answer
from services.router.catalogue import Catalogue, ServedModel
from services.router.front.call import ByteBudget, Call, Caller, Incoming, Together
from services.router.front.http.answers import Writer
from services.router.front.http.body import Body, BodyLimits, no_json, read_body
from services.router.front.http.reply import DIRECT, REQUEST_ID, ROOM, Reply, http_error, kept_alive
from services.router.front.intake import Intake
from services.router.front.progress import words
from services.router.tenants.gate import Gate
from services.router.tenants.tenant import Tenant, demand_together
from services.router.text.token_texts import TokenTexts
from services.rpc.logging import ids
from services.rpc.parameters import check_label


class AskedPrompt(Protocol):
    """Is one prompt of a call, with its request."""

    @property
    def incoming(self) -> Incoming:
        """Returns what is left of the request: the prompt is dropped when it is tokenised."""
        ...

    @property
    def params(self) -> Mapping[str, str]:
        """Returns the request's field names in the body, where they differ."""
        ...

    @property
    def rename(self) -> Callable[[str], str]:
        """Returns what makes the names of fields that are not among `params`."""
        ...


class EndpointCall(Protocol):
    """Is what an endpoint makes of a body."""

    @property
    def prompts(self) -> Sequence[AskedPrompt]: ...

    @property
    def is_stream(self) -> bool: ...

    def writer(self, request_id: str, model_id: str, reply: Reply) -> Writer:
        """Returns what writes the answers to the prompts."""
        ...


Write = Callable[[int, Answer], Awaitable[None]]
"""Writes the answer to the prompt with that index."""


async def answer_all(
    intake: Intake,
    prompts: Sequence[AskedPrompt],
    request_id: str,
    write: Write,
    call_of: Callable[[Incoming], Call],
    submitted: Callable[[Answer], object] = lambda answer: None,
) -> None:
    """Submits the prompts, each as the call that `call_of` makes of it, and has their answers written by `write`.

    `submitted` is told of each answer that begins. Raises the error of the first prompt that fails, with its field as
    the client wrote it.
    """
    # All prompts are validated and admitted before a token of any of them is written.
    admitted = asyncio.Barrier(len(prompts))

    async def answer_one(index: int, prompt: AskedPrompt) -> None:
        prompt.incoming.request.request_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        taken = intake.answer(call_of(prompt.incoming))
        with with_client_names(prompt.params, prompt.rename):
            async with taken as answer:
                submitted(answer)
                await admitted.wait()
                if len(prompts) > 1:
                    group.create_task(fail_with(answer, prompt), name=f"http prompt {index}, its end")
                await write(index, answer)

    async def fail_with(answer: Answer, prompt: AskedPrompt) -> None:
        """Raises the error that ends this answer, even while its own prompt waits for a client that does not read."""
        with with_client_names(prompt.params, prompt.rename):
            await answer.settled()

    try:
        async with asyncio.TaskGroup() as group:
            for index, prompt in enumerate(prompts):
                group.create_task(answer_one(index, prompt), name=f"http prompt {index}")
    except BaseExceptionGroup as failed:
        # A defect is reported rather than errors that may have followed from it.
        error = next((one for one in failed.exceptions if not isinstance(one, BatonError)), failed.exceptions[0])
    else:
        return
    raise error


@contextlib.contextmanager
def with_client_names(params: Mapping[str, str], rename: Callable[[str], str]) -> Iterator[None]:
    """Renames the field of an InvalidRequest to its name in the body or the headers: that of the longest part of its
    path which is among `params`, with the rest after it; else what `rename` makes of it."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(_client_name(error.field, params, rename), error.description) from error


def _client_name(field: str, params: Mapping[str, str], rename: Callable[[str], str]) -> str:
    names = {"request_id": REQUEST_ID, **params}
    parts = [found.start() for found in re.finditer(r"[.\[]", field)]
    for end in (len(field), *reversed(parts)):
        if (name := names.get(field[:end])) is not None:
            return name + field[end:]
    return rename(field)


log = logging.getLogger(__name__)

SESSION = "x-session-id"
"""Names the conversation of a body that does not. Many clients can add headers to every call, and no field."""
# The client's timeout in seconds, and the time that Envoy will wait, in milliseconds.
TIMEOUT, ENVOY_TIMEOUT_MS = "x-request-timeout", "x-envoy-expected-rq-timeout-ms"

_NUMBER = re.compile(r"[0-9]{1,64}(\.[0-9]{0,64})?([eE][+-]?[0-9]{1,4})?", re.ASCII)
"""Python's float would also accept underscores, signs, blanks and words."""


TENANT = "tenant"
"""Name under which the state of a request's scope has its tenant: `app.py` sets it for each path that needs a key."""


def caller_of(gate: Gate, scope: Scope) -> Tenant:
    """Returns the tenant whose key the request has. Raises InvalidKey."""
    try:
        return gate.tenant_of(Headers(scope=scope).getlist("authorization"))
    except InvalidKey as error:
        client = scope.get("client")
        gate.log_refusal(error, scope["path"], lambda: network_of(client[0]) if client else "")
        raise


ReadCall = Callable[[Body, TokenTexts], EndpointCall]


class Generation:
    """Serves one endpoint (an ASGI app). A call waits for no client but its own."""

    def __init__(
        self,
        intake: Intake,
        catalogue: Catalogue,
        gate: Gate,
        read_call: ReadCall,
        budget: ByteBudget,
        limits: BodyLimits,
        keepalive_s: float,
    ) -> None:
        """`budget` bounds all bytes of requests in the process. `keepalive_s` is how long a stream may be silent; 0 for
        as long as it likes."""
        self._keepalive_s = keepalive_s
        self._intake = intake
        self._catalogue = catalogue
        self._gate = gate
        self._read_call = read_call
        self._budget = budget
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers[REQUEST_ID]
        reply = Reply(send, scope["state"][ROOM], scope["state"][DIRECT])
        if (refusal := no_json(headers)) is not None:
            await reply.failed(refusal)
            return
        try:
            with contextlib.ExitStack() as charges:
                tenant = scope["state"][TENANT]
                caller = Caller(tenant, headers.get("traceparent", ""), front="http")
                with self._intake.refusals(caller=caller, request_id=request_id):
                    timeout_s = _timeout_s(headers)
                    with self._gate.arrival(tenant):
                        model, call = await self._read(receive, headers, tenant, request_id, charges)
                    tenant = caller_of(self._gate, scope)  # again: the body may have come slowly
                    caller = replace(caller, tenant=tenant)
                    together = None
                    if (num_prompts := len(call.prompts)) > 1:
                        demand_together(tenant, num_prompts)
                        party = charges.enter_context(self._gate.party(tenant, num_prompts))
                        together = Together(num_prompts, party)
                answers: list[Answer] = []
                answering = answer_all(
                    self._intake,
                    call.prompts,
                    request_id,
                    call.writer(request_id, model.model_id, reply).write,
                    lambda incoming: Call(
                        caller,
                        model,
                        incoming,
                        timeout_s=timeout_s,
                        stream=call.is_stream,
                        together=together,
                    ),
                    answers.append,
                )
                async with kept_alive(reply, self._keepalive_s if call.is_stream else 0, lambda: _where(answers)):
                    await while_connected(receive, answering)
        except Exception as error:  # the outermost handler: whatever it is, the client gets an answer and no traceback
            answer = http_error(error)
            forget_frames(error)
            await reply.failed(answer)

    async def _read(
        self, receive: Receive, headers: Headers, tenant: Tenant, request_id: str, charges: contextlib.ExitStack
    ) -> tuple[ServedModel, EndpointCall]:
        """Reads the body into a call, and finds its model.

        The body is charged while it is read, then each prompt. The body itself is freed when this returns.
        """
        with self._budget.charge() as reading:
            body = await read_body(receive, headers, self._limits, reading)
            model = self._catalogue.get(body.text("model"), tenant)
            call = self._read_call(body, model.token_texts)
        session = headers.get(SESSION, "")
        check_label(SESSION, session)
        for prompt in call.prompts:
            if session and not prompt.incoming.request.HasField("session"):
                prompt.incoming.request.session = session
            prompt.incoming.charge = charges.enter_context(self._budget.charge())
            prompt.incoming.charge.grow(prompt.incoming.request.ByteSize())
        if unknown := body.unknown():
            log.debug("fields ignored: %s", ", ".join(unknown)[:200], extra=ids(request_id, ""))
        return model, call


def _where(answers: Sequence[Answer]) -> str:
    """Returns in words where the first of the requests is that has not ended."""
    live = (progress for answer in answers if (progress := answer.progress()) is not None)
    return words(progress) if (progress := next(live, None)) is not None else "waiting for the tokenizer"


def _timeout_s(headers: Headers) -> float | None:
    """Returns the shorter of the timeouts that the headers give, or None if they give none.

    A header given twice is no number.
    """
    given = [(TIMEOUT, 1.0), (ENVOY_TIMEOUT_MS, 1e-3)]
    limits = [_positive(name, ", ".join(headers.getlist(name))) * unit for name, unit in given if name in headers]
    return min(limits, default=None)


def _positive(name: str, text: str) -> float:
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if number <= 0:
        shown = text if len(text) <= 64 else text[:64] + "…"
        raise InvalidRequest(name, f"is {shown!r}; it must be a positive number")
    return number


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work` to its end, or cancels it at once when the client disconnects. Returns True if it ended by itself.

    Call it only for a request whose body has been read: `receive` then reports only the connection's end.
    """
    working = asyncio.create_task(work, name="http answer")
    watching = asyncio.create_task(_gone(receive), name="http connection")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if working.cancelled():
        return False
    working.result()
    return True


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
