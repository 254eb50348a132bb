"""One call over HTTP: a body becomes GenerateRequests, which take the router's one way in and are answered.

Never: what an endpoint's fields mean (completions.py, chat.py), or how several prompts go together (several.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.core.errors import InvalidRequest
from services.core.ids import new_request_id
from services.router.http.body import Body, read_body
from services.router.http.call import Call
from services.router.http.connection import while_connected
from services.router.http.errors import http_error
from services.router.http.logprobs import TokenTexts
from services.router.http.reply import REQUEST_ID, Reply
from services.router.http.several import answer_all
from services.router.http.writers import writer
from services.router.intake import Intake
from services.rpc.logging import ids

log = logging.getLogger(__name__)

# Seconds, a client's; and what Envoy tells of the time it will wait, milliseconds.
TIMEOUT, ENVOY_TIMEOUT_MS = "x-request-timeout", "x-envoy-expected-rq-timeout-ms"

ReadCall = Callable[[Body, TokenTexts], Call]


class Generation:
    """An endpoint (ASGI). Waits for no client but the one it serves."""

    def __init__(self, intake: Intake, texts: TokenTexts, read_call: ReadCall, *, max_body_bytes: int) -> None:
        self._intake = intake
        self._texts = texts
        self._read_call = read_call
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID) or new_request_id()
        reply = Reply(send, request_id)
        try:
            with self._intake.refusals():
                timeout_s = _timeout_s(headers)
                body = await read_body(receive, headers, self._max_body_bytes)
                call = self._read_call(body, self._texts)
            if unknown := body.unknown():
                log.debug("fields ignored: %s", ", ".join(unknown)[:200], extra=ids(request_id, ""))
            answering = answer_all(
                self._intake,
                call.prompts,
                request_id,
                writer(call, request_id, self._intake.model.facts.model_id, reply).take,
                traceparent=headers.get("traceparent", ""),
                timeout_s=timeout_s,
                stream=call.options.stream,
            )
            await while_connected(receive, answering)
        except Exception as error:  # the edge: whatever it is, the client gets an answer and no traceback
            await reply.failed(http_error(error))


def _timeout_s(headers: Headers) -> float | None:
    """The shorter of what the headers say; None: as long as it takes."""
    given = [(TIMEOUT, 1.0), (ENVOY_TIMEOUT_MS, 1e-3)]
    limits = [_positive(name, headers[name]) * unit for name, unit in given if name in headers]
    return min(limits, default=None)


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InvalidRequest(name, f"is {text!r}; it must be a positive number")
    return number
