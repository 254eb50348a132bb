"""Tests what a request with a wrong key costs before it is refused, in calls of functions: no clock is read."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message

from services.core.clock import MonotonicClock
from services.router.front.call import ByteBudget
from services.router.front.http.app import make_app
from services.router.front.http.body import BodyLimits
from services.router.tenants.gate import Gate
from services.router.tenants.keys import new_key
from tests.support.tenants import TenantsFile


async def cost_of(app: ASGIApp, path: str) -> tuple[int, int]:
    """Returns the status that a request with a wrong key is answered with, and how many calls that took."""
    sent: list[Message] = []
    num_calls = 0

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("its body is not read")

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    headers = {"host": "localhost", "content-type": "application/json", "authorization": f"Bearer {new_key()}"}
    scope: dict[str, Any] = {
        **{"type": "http", "http_version": "1.1", "scheme": "http", "method": "POST", "query_string": b""},
        **{"path": path, "raw_path": path.encode(), "root_path": "", "client": ("127.0.0.1", 1), "state": {}},
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sys.setprofile(count)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
    return sent[0]["status"], num_calls


async def test_a_wrong_key_costs_less_than_a_path_that_is_not_there(tmp_path: Path) -> None:
    file, clock, nobody = TenantsFile(tmp_path), MonotonicClock(), Any
    file.write(acme={})
    gate = Gate(str(file.path), clock)
    app = make_app(
        nobody,
        nobody,
        gate,
        CollectorRegistry(),
        ByteBudget(1),
        BodyLimits(1, 1),
        clock=clock,  # type: ignore[arg-type]
    )
    for path in ("/nothing", "/v1/completions"):
        await cost_of(app, path)  # what is made once; and a line is in the log of this second
    status, nothing = await cost_of(app, "/nothing")
    assert status == 404
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/nothing", "/tokenize", "/detokenize"):
        status, wrong = await cost_of(app, path)
        assert status == 401
        assert wrong < nothing
