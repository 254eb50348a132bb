"""Serves the console over HTTP: its page, its events, and single requests.

Whoever reaches the port may look if the router is bound to loopback. Else the page is served only where a token is set
(`--console-token-file`), to those who have logged in with it. The pages of other origins get no data here, also those
that may use the API. Owns: who may look, and the paths. Never: what is shown (`rows.py`, `bars.py`), or
when (`feed.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from services.core.clock import Clock
from services.core.cluster_token import token_of_file
from services.core.ids import new_incarnation
from services.router.catalogue import Catalogue
from services.router.config import RouterConfig
from services.router.console import rows
from services.router.console.bars import bars_of, otlp_of
from services.router.console.feed import ConsoleFeed
from services.router.front.http.reply import plain_error
from services.router.front.operator.explanation_messages import explained
from services.router.front.operator.timeline_messages import now_of, stages
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.slo import NEAR, Objectives
from services.router.telemetry.timelines import Timeline, Timelines
from services.rpc.plain import plain

log = logging.getLogger(__name__)

FLAG = "--console-token-file"
COOKIE = "baton_console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # Not "no-referrer": forms would then be sent with `Origin: null`, and nobody could log in.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
    "txt": "text/plain; charset=utf-8",
}
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_FORM_BYTES = 4096
_LOGIN_SECONDS = 30 * 24 * 3600

Endpoint = Callable[[Request], Awaitable[Response]]


def make_console(
    config: RouterConfig,
    catalogue: Catalogue,
    timelines: Timelines,
    requests: RequestMetrics,
    objectives: Objectives,
    clock: Clock,
    addresses: Callable[[], dict[str, str]],
) -> Console | None:
    """Returns the console of a router; None if nobody is to look, or anybody could.

    `addresses` tells the router's addresses by what they are for (grpc, http, control) once they are known. Raises
    ConfigError.
    """
    if config.http_port < 0 or not config.console:
        return None
    if not config.serves_console(config.host):
        log.info("no console: it is served on loopback to everybody where there are no tenants, or with %s", FLAG)
        return None
    token = token_of_file(config.console_token_file, FLAG) if config.console_token_file else ""
    incarnation = f"{new_incarnation():x}"  # in a container, the next process has the same id

    def hello() -> dict[str, Any]:
        about = {"pid": os.getpid(), "version": version("baton-serving"), "jaeger": config.jaeger_url or None}
        return {
            "router": about | addresses() | {"tls": bool(config.public_tls_cert or config.tls_cert)},
            "incarnation": incarnation,
            "objectives": dataclasses.asdict(objectives),
            "near": NEAR,
            "log_prompts": config.log_prompts,
            "needs_key": bool(config.tenants),
            "at": round(time.time(), 3),
        }

    feed = ConsoleFeed(catalogue, timelines, requests, clock, hello)
    return Console(feed, catalogue, timelines, clock, token)


class Console:
    """Makes the console's routes. Call `close` before the HTTP server stops."""

    def __init__(self, feed: ConsoleFeed, catalogue: Catalogue, timelines: Timelines, clock: Clock, token: str) -> None:
        """`token` is what one logs in with; empty: everybody may look."""
        self.feed = feed
        self._catalogue = catalogue
        self._timelines = timelines
        self._clock = clock
        self._token = token
        self._pass = hmac.new(token.encode(), secrets.token_bytes(32), hashlib.sha256).hexdigest()
        """What the cookie of those who have logged in says; another after each start."""
        self._files = dict(_static_files())

    def routes(self) -> list[Route]:
        def route(path: str, endpoint: Endpoint, **more: Any) -> Route:
            return Route(path, partial(self._guarded, endpoint), **more)

        return [
            Route("/", self._index),
            Route("/console/login", self._login, methods=["POST"]),
            route("/console/events", self._events),
            route("/console/requests/{number}", self._request),
            route("/console/requests/{number}/otlp", self._otlp),
            Route("/console/{path:path}", self._file),
        ]

    async def close(self) -> None:
        await self.feed.close()

    # Who may look

    def _may_look(self, request: Request) -> bool:
        return not self._token or hmac.compare_digest(request.cookies.get(COOKIE, "").encode(), self._pass.encode())

    async def _guarded(self, endpoint: Endpoint, request: Request) -> Response:
        if not _is_same_origin(request):
            return _refused(403, "the console is for its own page", "forbidden_origin")
        if not self._may_look(request):
            return _refused(401, "log in first", "unauthenticated")
        return await endpoint(request)

    async def _login(self, request: Request) -> Response:
        if not _is_same_origin(request):
            return _refused(403, "the console is for its own page", "forbidden_origin")
        given = await _form_field(request, "token")
        if given is None or not self._token or not hmac.compare_digest(given.encode(), self._token.encode()):
            return RedirectResponse("/?refused", 303, _HEADERS)
        answer = RedirectResponse("/", 303, _HEADERS)
        secure = request.url.scheme == "https"  # else a browser sends it in the clear too, to the host's other ports
        answer.set_cookie(
            COOKIE, self._pass, max_age=_LOGIN_SECONDS, path="/", secure=secure, httponly=True, samesite="strict"
        )
        return answer

    # What is there

    async def _index(self, request: Request) -> Response:
        """Answers with the page, or with that on which one logs in. Neither says anything of the cluster."""
        return self._static("index.html" if self._may_look(request) else "login.html", request)

    async def _file(self, request: Request) -> Response:
        """Answers with a file of the page. These say nothing of the cluster, and the login page needs some."""
        return self._static(request.path_params["path"], request)

    def _static(self, path: str, request: Request) -> Response:
        found = self._files.get(path)
        if found is None:
            return _refused(404, "there is no such file", "not_found")
        body, tag = found
        headers = {**_HEADERS, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_TYPES[path.rpartition(".")[2]])

    async def _events(self, request: Request) -> Response:
        if not self.feed.has_room:
            return _refused(503, "too many look at the console already", "overloaded")
        return StreamingResponse(self.feed.events(), headers=_HEADERS, media_type="text/event-stream")

    async def _request(self, request: Request) -> Response:
        timeline = self._timeline(request)
        if timeline is None:
            return _refused(404, "nothing is remembered of this request", "not_found")
        live, now = now_of(self._catalogue, timeline), self._clock.now()
        placed = explained(self._catalogue.all(), timeline.label, now, timeline.request_id)
        answer: dict[str, Any] = {
            "row": rows.request_row(self._catalogue, timeline, self.feed.epoch_s),
            "bars": [bar.row() for bar in bars_of(timeline, stages(timeline, live))],
            "placements": [],
        }
        if placed:
            found = plain(placed[-1])
            answer["placements"] = found["choices"]
            answer["num_forgotten"] = found["num_forgotten"]
            if "waiting" in found:
                answer["waiting"] = found["waiting"]
        return JSONResponse(answer, headers=_HEADERS)

    def _timeline(self, request: Request) -> Timeline | None:
        number = request.path_params["number"]
        return self._timelines.find(int(number)) if _NUMBER.fullmatch(number) else None

    async def _otlp(self, request: Request) -> Response:
        timeline = self._timeline(request)
        if timeline is None:
            return _refused(404, "nothing is remembered of this request", "not_found")
        bars = bars_of(timeline, stages(timeline, now_of(self._catalogue, timeline)))
        document = otlp_of(timeline, bars, self.feed.epoch_s + timeline.arrived_s)
        name = f"baton-request-{timeline.number}.json"
        return JSONResponse(document, headers={**_HEADERS, "content-disposition": f'attachment; filename="{name}"'})


def _is_same_origin(request: Request) -> bool:
    """Returns whether the request does not come from a page of another origin: browsers say where it comes from."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:  # it is none
        return False


async def _form_field(request: Request, name: str) -> str | None:
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_FORM_BYTES:
                return None
    except ClientDisconnect:
        return None
    fields = parse_qs(body.decode("ascii", errors="replace"))
    return fields.get(name, [None])[-1]


def _refused(status: int, message: str, code: str) -> Response:
    error = plain_error(status, message, code)
    return JSONResponse(error.body, error.status, {**_HEADERS, **(error.headers or {})})


def _static_files() -> list[tuple[str, tuple[bytes, str]]]:
    """Returns the page's files by their paths, each with a tag of its content."""
    found, pending = [], [(resources.files("services.router.console") / "static", "")]
    while pending:
        folder, prefix = pending.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                pending.append((entry, f"{prefix}{entry.name}/"))
            elif entry.name.rpartition(".")[2] in _TYPES:
                body = entry.read_bytes()
                found.append((prefix + entry.name, (body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')))
    return found
