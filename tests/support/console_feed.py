"""Provides the console's page over a feed that a test fills: what no real cluster says on demand,
hostile names included.

The page, its headers and its files are those of the router; only what `/console/events` and `/console/requests/NUMBER`
say is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.ports import free_ports
from services.router.console.routes import POLICY
from tests.support import ROOT
from tests.support.patience import HANG_S, Patience

STATIC = ROOT / "services/router/console/static"
HOSTILE = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\x1b[2J\x00\u202egnp.exe\u2066"\'&amp;{}'
)
"""A name with HTML, a script, controls, what turns text around, quotes and entities."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "json": "text/json"}


def worker(worker_id: str, role: str = "prefill", **changes: Any) -> dict[str, Any]:
    return {
        "id": worker_id,
        "roles": [role],
        "model": "tiny-llama",
        "state": "ready",
        "reason": "",
        "address": "127.0.0.1:1",
        "host": "host-a",
        "pid": 42,
        "device": "cpu",
        "kernels": "native",
        "fingerprint": "abc (torch; float32)",
        "blocks": {"importing": 1, "leased": 3, "active": 20, "cached": 40, "free": 64},
        "running": 2,
        "waiting": 1,
        "queued_tokens": 512,
        "requests": 3,
        "prefill_step_ms": 41.5,
        "decode_step_ms": 12.25,
        "current_step_ms": 0.0,
        "tokens_per_s": 310.5,
        "prefix_queried": 1000,
        "prefix_hit": 250,
        "preemptions": 0,
        "load_age_ms": 120,
    } | changes


def stage(name: str, start_ms: float, end_ms: float | None, **changes: Any) -> dict[str, Any]:
    """Returns a stage of the router's own."""
    fields = {"name": name, "start_ms": start_ms, "end_ms": end_ms, "worker": "", "leg": 0, "attempt": 1}
    return fields | {"outcome": "done" if end_ms is not None else ""} | changes


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Returns a request that was split, and has ended well."""
    return {
        "number": number,
        "id": f"request-{number}",
        "model": "tiny-llama",
        "trace_id": f"{number:032x}",
        "arrived": time.time() - 5,
        "phase": "ended",
        "prompt_tokens": 1782,
        "cached_tokens": 16,
        "output_tokens": 64,
        "max_tokens": 64,
        "priority": 0,
        "ttft_ms": 428.0,
        "total_ms": 3740.0,
        "tpot_ms": 52.6,
        "longest_itl_ms": 102.7,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "outcome": "length",
        "failure": "",
        "retries": 0,
        "stages": [
            stage("tokenize", 0.3, 4.7),
            stage("queue", 5.0, 5.4),
            {
                "name": "prefill",
                "start_ms": 5.5,
                "end_ms": 428.0,
                "worker": "prefill-0",
                "leg": 2 * number,
                "attempt": 1,
                "outcome": "done",
            },
            {
                "name": "decode",
                "start_ms": 9.3,
                "end_ms": 3740.0,
                "worker": "decode-0",
                "leg": 2 * number + 1,
                "attempt": 1,
                "outcome": "done",
            },
        ],
        "timings": {
            "tokenize_ms": 4.4,
            "queue_ms": 2.0,
            "prefill_wait_ms": 0.3,
            "prefill_compute_ms": 420.0,
            "transfer_ms": 307.2,
            "transfer_overlapped_ms": 294.0,
            "transfer_exposed_ms": 13.2,
            "decode_wait_ms": 3.6,
            "decode_run_ms": 3290.0,
            "transfer_bytes": 40894464,
            "transfer_blocks": 111,
            "transport": "shm",
        },
        "prompt": "",
        "output": "",
    } | changes


def bars(of: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the waterfall of `row`."""

    def bar(
        name: str, depth: int, start_ms: float, end_ms: float | None, kind: str, worker_id: str = "", **more: Any
    ) -> Any:
        fields = {
            "name": name,
            "depth": depth,
            "start_ms": start_ms,
            "end_ms": end_ms,
            "kind": kind,
            "worker": worker_id,
        }
        return {**fields, "hidden": False, "outcome": "", "attributes": {}, "events": [], **more}

    prefill, decode = of["prefill_worker"], of["decode_worker"]
    return [
        bar("baton.request", 0, 0, of["total_ms"], "router", events=[{"name": "first_token", "at_ms": 428.0}]),
        bar("tokenize", 1, 0.3, 4.7, "router"),
        bar("queue", 1, 5.0, 5.4, "router"),
        bar("prefill", 1, 5.5, 428.0, "prefill", prefill, outcome="done", attributes={"leg": 1, "note": HOSTILE}),
        bar("prefill.wait", 2, 6.4, 6.7, "prefill", prefill),
        bar("prefill.compute", 2, 6.7, 427.0, "prefill", prefill, events=[{"name": "chunk", "at_ms": 120.0}]),
        bar("decode", 1, 9.3, of["total_ms"], "decode", decode, outcome=of["outcome"]),
        bar("kv.transfer", 2, 133.0, 427.0, "transfer", decode, hidden=True),
        bar("kv.transfer", 2, 427.0, 440.2, "transfer", decode, attributes={"bytes": 40894464}),
        bar("decode.run", 2, 444.0, of["total_ms"], "decode", decode),
    ]


def placement(winner: str, loser: str) -> dict[str, Any]:
    return {
        "phase": "prefill",
        "leg": 1,
        "attempt": 1,
        "age_us": 5_000_000,
        "waited_us": 6800,
        "outcome": "done",
        "terms": [{"name": "short_queue", "weight": 4.0}, {"name": "free_memory", "weight": 1.0}],
        "candidates": [
            {"worker_id": winner, "score": 5.0, "values": [1.0, 1.0]},
            {"worker_id": loser, "score": 3.2, "values": [0.55, 1.0]},
        ],
        "num_candidates": 2,
        "left_out": [{"worker_id": "prefill-9", "reason": "no_blocks"}],
        "num_left_out": 1,
        "verdict": {
            "decider": "term",
            "term": "short_queue",
            "term_difference": 1.8,
            "score_difference": 1.8,
            "queue_ms": 422.5,
        },
    }


class ConsoleFeed:
    """Serves the page on 127.0.0.1. What a test changes is sent within half a second."""

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]
        about = {
            "pid": 1,
            "version": "0.1.0",
            "grpc": "127.0.0.1:50051",
            "http": f"127.0.0.1:{self.port}",
            "control": "127.0.0.1:50052",
            "tls": False,
            "jaeger": None,
        }
        self.hello: dict[str, Any] = {
            "router": about,
            "objectives": {"ttft_ms": 500.0, "tpot_ms": 50.0, "itl_ms": 200.0, "queue_ms": 100.0, "e2e_ms": 30_000.0},
            "near": 0.8,
            "log_prompts": False,
            "needs_key": False,
        }
        self.workers = [worker("prefill-0"), worker("decode-0", "decode")]
        self.pairs = [
            {
                "prefill": "prefill-0",
                "decode": "decode-0",
                "state": "proven",
                "reason": "",
                "transport": "shm",
                "handoff_ms": 3.1,
            }
        ]
        self.rows = [row(1)]
        self.details: dict[int, dict[str, Any]] = {}
        self.models = [
            {
                "id": "tiny-llama",
                "ready": True,
                "policy": "balanced",
                "queued": 0,
                "live": 1,
                "workers": 2,
                "context_tokens": 2048,
                "split": {"prefill": "prefill-0", "decode": "decode-0", "tokens": 210, "handoff_ms": 3.1},
            }
        ]
        self.num_viewers = 0
        self._num_cuts = 0
        self.end: Callable[[], None] = lambda: None
        """Lets all viewers go and stops serving."""

    def cut(self) -> None:
        """Ends the streams of all who look: their browsers connect again."""
        self._num_cuts += 1

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def state(self) -> dict[str, Any]:
        live = [each["phase"] for each in self.rows]
        return {
            "at": time.time(),
            "ready": True,
            "phases": {name: live.count(name) for name in ("queued", "prefilling", "parked", "decoding")},
            "prompt_tokens_per_s": 1200.0,
            "output_tokens_per_s": 310.5,
            "requests_per_s": 2.5,
            "models": self.models,
            "workers": self.workers,
            "gone": [],
            "pairs": self.pairs,
            "pairs_gone": [],
            "itl": {
                "buckets_ms": [10, 50, 100, 200, 500],
                "split": [0, 20, 70, 8, 2, 0],
                "unsplit": [0, 0, 0, 0, 8, 0],
            },
        }

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", lambda request: _file("index.html")),
                Route("/console/events", self._events),
                Route("/console/requests/{number:int}", self._request),
                Route("/console/requests/{number:int}/otlp", lambda request: JSONResponse({"resourceSpans": []})),
                Route("/console/{path:path}", lambda request: _file(request.path_params["path"])),
            ]
        )

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self._told(), media_type="text/event-stream")

    async def _told(self) -> AsyncIterator[str]:
        self.num_viewers += 1
        cuts = self._num_cuts
        try:
            yield _event("hello", {**self.hello, "at": time.time()})
            while cuts == self._num_cuts:
                yield _event("state", self.state())
                yield _event("requests", {"at": time.time(), "requests": self.rows})
                await asyncio.sleep(0.5)
        finally:
            self.num_viewers -= 1

    async def _request(self, request: Request) -> Response:
        number = request.path_params["number"]
        found = next((each for each in self.rows if each["number"] == number), None)
        if found is None:
            return JSONResponse({"error": {"message": "nothing is remembered of it"}}, 404)
        detail = {"row": found, "bars": bars(found), "placements": [placement("prefill-0", HOSTILE)]}
        return JSONResponse(detail | self.details.get(number, {}))


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _file(path: str) -> Response:
    place = (STATIC / path).resolve()
    assert place.is_relative_to(STATIC), path
    if not place.is_file():
        return JSONResponse({}, 404)
    return Response(
        place.read_bytes(), media_type=_TYPES[place.suffix[1:]], headers={"content-security-policy": POLICY}
    )


@contextlib.contextmanager
def serving(feed: ConsoleFeed) -> Iterator[ConsoleFeed]:
    """Serves until the block ends."""
    config = uvicorn.Config(
        feed.app(), host="127.0.0.1", port=feed.port, log_level="error", timeout_graceful_shutdown=1, lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="console-feed")
    thread.start()

    def end() -> None:
        server.should_exit = True
        thread.join(10)

    feed.end = end
    try:
        patience = Patience(HANG_S)
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            assert not patience.is_over(), "the server does not start"
            time.sleep(0.01)
        yield feed
    finally:
        end()
