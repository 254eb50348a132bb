"""Routes paths to endpoints, serves the small ones (models, health, metrics), and limits what a web page may ask.

A router on a laptop can be reached by every page that is open in a browser there. So bodies must be declared as JSON
(body.py), which a page of another origin can send only after a preflight; the preflight is answered for the configured
origins; and a router that is bound to loopback answers only to names of loopback, since a page's own name may be made
to point there (DNS rebinding). Never: generation (generation.py), sockets (server.py), or whose a key
is (`tenants/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.v1 import control_pb2
from services.core.addresses import bare_host, host_names
from services.core.clock import Clock
from services.core.errors import BatonError, InvalidKey, forget_frames
from services.core.ids import new_request_id
from services.router.catalogue import Catalogue, ServedModel
from services.router.front.call import ByteBudget
from services.router.front.http import chat, completions
from services.router.front.http.body import BodyLimits
from services.router.front.http.generation import TENANT, Generation, caller_of
from services.router.front.http.reply import REQUEST_ID, HttpError, http_error, plain_error, printable_header, refuse
from services.router.front.http.responses.call import read_call as read_response_call
from services.router.front.http.tokenise import Tokenisation, read_detokenize, read_tokenize
from services.router.front.intake import Intake
from services.router.status import components_of, status
from services.router.tenants.gate import Gate
from services.rpc.plain import plain
from services.rpc.prometheus import Rendering

_COMPONENTS_S = 1.0
_EXPOSED = (REQUEST_ID, "retry-after", "retry-after-ms")
_REQUEST_ID = REQUEST_ID.encode()
_NEEDS_KEY = ("/v1/", "/tokenize", "/detokenize")
"""How the paths begin that only tenants may ask for, where there are any."""


def guarded(app: ASGIApp, bound: str, *, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> ASGIApp:
    """Wraps the app with the checks of host names and origins.

    `bound` is the address it listens on. `hosts` are names by which clients may ask, beside those of loopback. Every
    answer gets a request id, and those to pages of other `origins` what these need to read it.
    """
    app = _Guard(app, host_names(bound, hosts))
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )
    return _Identified(app)


class _Identified:
    """Gives every request an id, unless it has one, and every answer that of its request.

    Characters that cannot stand in a header or a log are escaped, so the rest of the process need not know of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
        header = (_REQUEST_ID, printable_header(given) or new_request_id().encode())
        others = [pair for pair in scope["headers"] if pair[0] != _REQUEST_ID]

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app({**scope, "headers": [*others, header]}, receive, identified)


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
            await refuse(send, error)

    def _error(self, headers: Headers) -> HttpError | None:
        host = headers.get("host")
        if self._names is not None and host is not None and bare_host(host) not in self._names:
            return plain_error(
                403,
                f"the router does not answer to the host {host[:256]!r}; --http-allowed-host adds one",
                "unknown_host",
            )
        return None


class _Keyed:
    """Answers requests that need a key and have no valid one before they are routed: such a request costs less than one
    for a path that is not there."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(_NEEDS_KEY):
            try:
                scope["state"][TENANT] = caller_of(self._gate, scope)
            except InvalidKey as error:
                answer = http_error(error)
                forget_frames(error)
                await refuse(send, answer)
                return
        await self._app(scope, receive, send)


def make_app(
    intake: Intake,
    catalogue: Catalogue,
    gate: Gate,
    registry: CollectorRegistry,
    budget: ByteBudget,
    limits: BodyLimits,
    console: Sequence[Route] = (),
    keepalive_s: float = 0.0,
    *,
    clock: Clock,
) -> ASGIApp:
    """Returns the application. `console` are the routes of the console, if there is one.

    Where callers need keys there are no metrics: they tell of all tenants, and have a port of their own.
    """
    small = _Small(catalogue, gate, registry, clock)
    complete = Generation(intake, catalogue, gate, completions.read_call, budget, limits, keepalive_s)
    chat_complete = Generation(intake, catalogue, gate, chat.read_call, budget, limits, keepalive_s)
    respond = Generation(intake, catalogue, gate, read_response_call, budget, limits, keepalive_s)
    tokenize = Tokenisation(catalogue, gate, read_tokenize, budget, limits)
    detokenize = Tokenisation(catalogue, gate, read_detokenize, budget, limits)
    app = Starlette(
        routes=[
            Route("/v1/models", small.models),
            Route("/v1/models/{model:path}", small.model),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", chat_complete, methods=["POST"]),
            Route("/v1/responses", respond, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", small.health),
            Route("/health/live", small.live),
            Route("/ping", small.live),
            Route("/version", small.version),
            *([Route("/metrics", small.metrics)] if gate.is_open else []),
            *console,
        ],
        exception_handlers={HTTPException: _no_such_endpoint, BatonError: _failed, Exception: _failed},
    )
    app.router.redirect_slashes = False  # a redirect would contain the host as the client wrote it
    return _Keyed(app, gate)


class _Small:
    """Serves endpoints that answer from the router's state."""

    def __init__(self, catalogue: Catalogue, gate: Gate, registry: CollectorRegistry, clock: Clock) -> None:
        self._catalogue = catalogue
        self._gate = gate
        self._rendering = Rendering(registry)
        self._clock = clock
        self._known: tuple[float, dict[str, Any]] | None = None
        """When the parts of the cluster were looked at last, and how they were."""

    async def models(self, request: Request) -> Response:
        tenant = request.scope["state"][TENANT]
        models = [_model(model) for model in self._catalogue.all() if tenant.may_use(model.model_id)]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        tenant = request.scope["state"][TENANT]
        return JSONResponse(_model(self._catalogue.get(request.path_params["model"], tenant)))

    async def health(self, request: Request) -> Response:
        """Answers 200 while a request for some model would be placed: for load balancers. Where callers need no keys
        it says too how the parts of the cluster are."""
        ready = self._catalogue.ready
        found: dict[str, Any] = {"status": "ready" if ready else "not ready"}
        if self._gate.is_open:
            found["components"] = self._components()
        return JSONResponse(found, 200 if ready else 503)

    def _components(self) -> dict[str, Any]:
        """Returns the parts of the cluster by name, found out at most once a second: anybody may ask for them."""
        now = self._clock.now()
        if self._known is None or now - self._known[0] >= _COMPONENTS_S:
            self._known = now, _by_name(components_of(self._catalogue, status(self._catalogue, now)))
        return self._known[1]

    async def live(self, request: Request) -> Response:
        """Answers 200 while the process serves: for supervisors. A router without workers must not be restarted."""
        return JSONResponse({"status": "live"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version("baton-serving")})

    async def metrics(self, request: Request) -> Response:
        body, content_type = await self._rendering.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _by_name(found: Sequence[control_pb2.Component]) -> dict[str, Any]:
    """Returns the parts by name: each a state, and a reason unless it is ok."""
    parts = map(plain, found)
    return {
        part["name"]: {"status": part["state"], **({"reason": part["reason"]} if part["reason"] else {})}
        for part in parts
    }


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.model_id,
        "object": "model",
        "created": int(model.created_s),
        "owned_by": "baton",
        "root": model.model_id,
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
