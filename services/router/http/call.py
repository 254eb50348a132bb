"""What an endpoint makes of a body: requests as the router knows them, and how their answers are to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.v1 import inference_pb2, types_pb2
from services.router.http.parameters import StreamOptions

Json = dict[str, Any]

_FINISH_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True)
class Ending:
    """How an output ended, in OpenAI's words, and which stop of the request's ended it (vLLM's `stop_reason`)."""

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
    """How one endpoint writes one prompt's choices. One for each prompt."""

    def whole(self, output: inference_pb2.Chunk, ending: Ending) -> Json:
        """The choice of an answer that is not streamed."""
        ...

    def opening(self) -> Json | None:
        """The choice before the first token's."""
        ...

    def delta(self, chunk: inference_pb2.Chunk) -> Json | None:
        """The choice of tokens as they come; None if the client would see nothing in it."""
        ...

    def closing(self, ending: Ending) -> Json:
        """The last choice."""
        ...


@dataclass(frozen=True)
class Objects:
    """How an endpoint names what it answers."""

    id_prefix: str
    whole: str
    chunk: str


@dataclass(frozen=True)
class Prompt:
    """One of a call's."""

    request: inference_pb2.GenerateRequest
    style: Style
    params: Mapping[str, str]
    """Names of the request's fields in this body, where they differ."""


@dataclass(frozen=True)
class Call:
    prompts: Sequence[Prompt]
    """Their order is that of the choices."""
    options: StreamOptions
    objects: Objects
