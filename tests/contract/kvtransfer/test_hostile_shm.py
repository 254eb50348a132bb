"""Tests that whoever has a source's socket can neither kill nor wedge a destination, nor leave anything there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from baton.v1 import types_pb2
from tests.support import ROOT
from tests.support.shm_victim import HOSTILE

pytestmark = pytest.mark.process

VICTIM = ROOT / "tests" / "support" / "shm_victim.py"
PATIENCE_S = 60.0


async def fetch_from(what: str) -> dict[str, Any]:
    """Returns what a destination in a process of its own made of it. Fails if that process did not live to tell."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipe = asyncio.subprocess.PIPE
    victim = await asyncio.create_subprocess_exec(sys.executable, str(VICTIM), what, stdout=pipe, env=environment)
    try:
        async with asyncio.timeout(PATIENCE_S):
            said, _ = await victim.communicate()
    finally:
        if victim.returncode is None:
            victim.kill()
            await victim.wait()
    assert victim.returncode == 0, f"{what}: the destination died of {victim.returncode}"
    result: dict[str, Any] = json.loads(said)
    return result


@pytest.mark.parametrize("what", [*HOSTILE, "of_another_user"])
async def test_a_hostile_socket(what: str) -> None:
    if what == "of_another_user" and os.geteuid() != 0:
        pytest.skip("only root can be two users")
    result = await fetch_from(what)
    assert result["served_again"]
    assert result["left_behind"] == []
    if what == "right":
        assert result["transport"] == types_pb2.TRANSPORT_SHM
        assert not result["right"], "it was the hostile socket's memory that was read"
        return
    assert result["mappings"] == 0
    if "error" in result:
        assert result["error"] == "ProtocolViolation"
    else:
        assert result["transport"] == types_pb2.TRANSPORT_GRPC
        assert result["right"]
