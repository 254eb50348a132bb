"""Runs this folder's tests on the event loop that workers run on: it treats sockets in its own way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.support import kv_harness
from tests.support.certificates import certificates, written


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a certificate of each role."""
    return written(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "TLS"])
def plain_or_tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, certified: Path) -> None:
    """Runs a test with sockets in clear, and again with sockets in TLS."""
    if request.param == "TLS":
        monkeypatch.setattr(kv_harness, "TLS", certificates(certified, "worker"))
