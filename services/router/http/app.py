"""Routes paths to endpoints, serves the small ones (models, health, metrics), and limits what a web page may ask.

A router on a laptop can be reached by every page that is open in a browser there. So bodies must be declared as JSON
(body.py), which a page of another origin can send only after a preflight; the preflight is answered for the configured
origins; and a router that is bound to loopback answers only to names of loopback, since a page's own name may be made
to point there (DNS rebinding). Never: generation (generation.py), sockets (server.py), or authentication.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.core.addresses import bare_host, host_names
from services.core.errors import BatonError
from services.router.byte_budget import ByteBudget
from services.router.catalogue import Catalogue, ServedModel
from services.router.http import chat, completions
from services.router.http.body import BodyLimits
from services.router.http.generation import Generation
from services.router.http.reply import REQUEST_ID, HttpError, http_error, plain_error, refuse
from services.router.intake import Intake
from services.rpc.metrics import SCRAPE_EVERY_S, known_format

_EXPOSED = (REQUEST_ID, "retry-after", "retry-after-ms")


def guarded(app: ASGIApp, bound: str, *, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> ASGIApp:
    """Wraps the app with the checks of host names and origins.

    `bound` is the address it listens on. `hosts` are names by which clients may ask, beside those of loopback.
    """
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return _Guard(app, host_names(bound, hosts))


class _Guard:
    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        """`names` are the hosts that are answered; None for any."""
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        else:
            await refuse(scope, send, error)

    def _error(self, headers: Headers) -> HttpError | None:
        host = headers.get("host")
        if self._names is not None and host is not None and bare_host(host) not in self._names:
            return plain_error(
                403,
                f"the router does not answer to the host {host[:256]!r}; --http-allowed-host adds one",
                "unknown_host",
            )
        return None


def make_app(
    intake: Intake, catalogue: Catalogue, registry: CollectorRegistry, budget: ByteBudget, limits: BodyLimits
) -> Starlette:
    small = _Small(catalogue, registry)
    complete = Generation(intake, catalogue, completions.read_call, budget, limits)
    chat_complete = Generation(intake, catalogue, chat.read_call, budget, limits)
    app = Starlette(
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
    app.router.redirect_slashes = False  # a redirect would contain the host as the client wrote it
    return app


class _Small:
    """Serves endpoints that answer from the router's state."""

    def __init__(self, catalogue: Catalogue, registry: CollectorRegistry) -> None:
        self._catalogue = catalogue
        self._scrapes = _Scrapes(registry)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(model) for model in self._catalogue.all()]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_model(self._catalogue.get(request.path_params["model"])))

    async def health(self, request: Request) -> Response:
        """Answers 200 while a request for some model would be placed: for load balancers."""
        ready = self._catalogue.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def live(self, request: Request) -> Response:
        """Answers 200 while the process serves: for supervisors. A router without workers must not be restarted."""
        return JSONResponse({"status": "live"})

    async def metrics(self, request: Request) -> Response:
        body, content_type = await self._scrapes.render(known_format(request.headers.get("accept", "")))
        return Response(body, headers={"content-type": content_type})


class _Scrapes:
    """Renders the metrics for all who wait, at most once in `SCRAPE_EVERY_S`, as `rpc.metrics.Rendering` does for
    threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        self._num_begun = 0
        self._begun_s = -math.inf
        self._last: dict[str, tuple[int, bytes, str]] = {}
        """By format: the number of the last rendering, its bytes and its content type."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns metrics no older than this call, in the format that the header `accept` asks for, and their content
        type."""
        num_before = self._num_begun
        async with self._turn:
            number, body, content_type = self._last.get(accept, (0, b"", ""))
            if number > num_before:
                return body, content_type  # it began while this call waited
            await asyncio.sleep(self._begun_s + SCRAPE_EVERY_S - asyncio.get_running_loop().time())
            self._num_begun, self._begun_s = self._num_begun + 1, asyncio.get_running_loop().time()
            encode: Callable[[CollectorRegistry], bytes]
            encode, content_type = choose_encoder(accept)
            # Runs on a thread, like a scrape of the metrics port: the collectors are made for that.
            body = await asyncio.to_thread(encode, self._registry)
            self._last[accept] = self._num_begun, body, content_type
            return body, content_type


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.model_id,
        "object": "model",
        "created": int(model.created_s),
        "owned_by": "baton",
        "max_model_len": model.context_tokens,
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
