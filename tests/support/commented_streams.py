"""Stands between clients and a router's HTTP, and puts a comment before every event of every stream: as many as
`--http-keepalive-s` sends at most, and at any place where it may.

Owns: the comments. Never: anything else of what either side says.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx2
from starlette.types import Receive, Scope, Send

from services.router.front.http.server import HttpServer

COMMENTS = (b": waiting, 3rd of 14\n\n", b": prefilling, 4096 of 7000\n\n", b": decoding, 2 tokens\n\n")
_PASSED_ON = (b"authorization", b"content-type", b"accept")


class CommentedStreams:
    """Is an ASGI application."""

    def __init__(self, router: httpx2.AsyncClient) -> None:
        self._router = router
        self.num_comments = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, more = b"", True
        while more:
            message = await receive()
            asked, more = asked + message.get("body", b""), message.get("more_body", False)
        headers = [(name, value) for name, value in scope["headers"] if name in _PASSED_ON]
        async with self._router.stream(scope["method"], scope["path"], content=asked, headers=headers) as answer:
            kind = answer.headers["content-type"]
            start = {"status": answer.status_code, "headers": [(b"content-type", kind.encode())]}
            await send({"type": "http.response.start", **start})
            if kind.startswith("text/event-stream"):
                async for event in self._commented(answer):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send(
                {"type": "http.response.body", "body": b"" if answer.is_stream_consumed else await answer.aread()}
            )

    async def _commented(self, answer: httpx2.Response) -> AsyncIterator[bytes]:
        event = b""
        async for line in answer.aiter_lines():
            event += f"{line}\n".encode()
            if not line:
                yield COMMENTS[self.num_comments % len(COMMENTS)]
                self.num_comments += 1
                yield event
                event = b""


@contextlib.asynccontextmanager
async def commented_streams(router: str) -> AsyncIterator[tuple[str, CommentedStreams]]:
    """Yields the address, to be used instead of the router's own."""
    async with httpx2.AsyncClient(base_url=router, timeout=60.0, trust_env=False) as client:
        app = CommentedStreams(client)
        server = HttpServer(app, "127.0.0.1", 0)
        await server.start()
        try:
            yield f"http://127.0.0.1:{server.port}", app
        finally:
            await server.stop()
