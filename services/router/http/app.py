"""Which path leads where, and the small endpoints: models, health, metrics.

Never: generation (generation.py), or sockets (server.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.core.errors import BatonError, UnknownModel
from services.router.coordinator import Coordinator
from services.router.http import chat, completions
from services.router.http.errors import HttpError, http_error, plain_error
from services.router.http.generation import Generation
from services.router.http.logprobs import TokenTexts
from services.router.intake import Intake


def make_app(
    intake: Intake, coordinator: Coordinator, registry: CollectorRegistry, *, max_body_bytes: int
) -> Starlette:
    texts = TokenTexts(intake.model.text.tokenizer)
    small = _Small(coordinator, registry, intake.model.facts.model_id)
    complete = Generation(intake, texts, completions.read_call, max_body_bytes=max_body_bytes)
    chat_complete = Generation(intake, texts, chat.read_call, max_body_bytes=max_body_bytes)
    return Starlette(
        routes=[
            Route("/v1/models", small.models),
            Route("/v1/models/{model:path}", small.model),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat_complete, methods=["POST"]),
            Route("/health", small.health),
            Route("/health/live", small.live),
            Route("/metrics", small.metrics),
        ],
        exception_handlers={HTTPException: _no_such_endpoint, BatonError: _failed, Exception: _failed},
    )


class _Small:
    """Endpoints that answer from what the router knows."""

    def __init__(self, coordinator: Coordinator, registry: CollectorRegistry, model_id: str) -> None:
        self._coordinator = coordinator
        self._registry = registry
        self._model_id = model_id
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._model_id:
            raise UnknownModel(f"model {name!r} is not served; {self._model_id!r} is")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """200 while a request would be placed: for load balancers."""
        ready = self._coordinator.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        """200 while the process serves: for what restarts it. A router without workers must not be restarted."""
        return JSONResponse({"status": "live"})

    async def metrics(self, request: Request) -> Response:
        encode: Callable[[CollectorRegistry], bytes]
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # On a thread, like a scrape of the metrics port: collectors are made for that.
        return Response(await asyncio.to_thread(encode, self._registry), headers={"content-type": content_type})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self._coordinator.context_tokens(),
        }


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _response(plain_error(error.status_code, message, code, error.headers))


async def _failed(request: Request, error: Exception) -> Response:
    return _response(http_error(error))


def _response(error: HttpError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)
