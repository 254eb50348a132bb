"""Writes a response: as one JSON object, or as a stream of events, each with its number and its type.

No event is written before the first token, so an error until then is reported by the status (unless a wait was long,
`kept_alive`); one that comes later ends the stream with `response.failed`. Owns: the response around its items, and its
usage. Never: the items (output.py), or bytes on the wire (reply.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from baton.v1 import inference_pb2, types_pb2
from services.router.answer import Answer, AnswerEvent
from services.router.front.http.answers import Json
from services.router.front.http.reply import HttpError, Reply, dump
from services.router.front.http.responses.output import OutputEvent, ResponseOutput


class ResponseWriter:
    """Makes the response as a whole. It is a `Writer`."""

    def __init__(self, echoed: Mapping[str, Any], request_id: str, model_id: str, reply: Reply) -> None:
        """`echoed` are the fields that tell what was asked for."""
        self._reply = reply
        self._head: Json = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_id,
            **echoed,
        }
        self._output = ResponseOutput(request_id)

    async def write(self, index: int, answer: Answer) -> None:
        async for event in answer:
            match event:
                case inference_pb2.Chunk():
                    self._output.add(event)
                case inference_pb2.Completion():
                    self._output.end(is_cut=_is_cut(event))
                    await self._reply.json(self._ended(event))

    def _ended(self, completion: inference_pb2.Completion) -> Json:
        return self._response("incomplete" if _is_cut(completion) else "completed", completion.usage)

    def _response(
        self, status: str, usage: inference_pb2.Usage | None = None, error: Mapping[str, str] | None = None
    ) -> Json:
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": None if usage is None else _written(usage),
        }


class ResponseStreamWriter(ResponseWriter):
    """Sends the response as events. The last one has all of it."""

    def __init__(self, echoed: Mapping[str, Any], request_id: str, model_id: str, reply: Reply) -> None:
        super().__init__(echoed, request_id, model_id, reply)
        self._num_sent = 0
        reply.write_error = self._failed

    async def write(self, index: int, answer: Answer) -> None:
        await answer.pass_on(self._take, self._reply.room)
        await self._reply.done(b"")

    def _take(self, event: AnswerEvent) -> None:
        match event:
            case inference_pb2.Chunk():
                self._tell(self._output.add(event))
            case inference_pb2.Completion():
                events = self._output.end(is_cut=_is_cut(event))
                response = self._ended(event)
                self._tell([*events, (response["status"], {"response": response})])

    def _tell(self, events: Iterable[OutputEvent]) -> None:
        if told := list(events):
            self._reply.part(self._written(told))

    def _written(self, told: Iterable[OutputEvent]) -> bytes:
        """Returns the events, after those that begin a stream if none was sent."""
        if not self._num_sent:
            # Written before the items that `told` may have completed.
            begun = {"response": {**self._response("in_progress"), "output": []}}
            told = [("created", begun), ("in_progress", begun), *told]
        return b"".join([self._framed(kind, fields) for kind, fields in told])

    def _failed(self, error: HttpError) -> bytes:
        """Returns the event that ends a stream which has begun."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        what = {"code": code, "message": error.body["error"]["message"]}
        return self._written([("failed", {"response": self._response("failed", error=what)})])

    def _framed(self, kind: str, fields: Json) -> bytes:
        kind = f"response.{kind}"
        payload = dump({"type": kind, "sequence_number": self._num_sent, **fields})
        self._num_sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)


def _written(usage: inference_pb2.Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _is_cut(completion: inference_pb2.Completion) -> bool:
    return completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
