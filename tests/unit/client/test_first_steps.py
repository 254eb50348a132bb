"""Tests what a first program meets: the example of the client's README with nobody there, and a text as a request."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from baton_client import ONCE, AsyncClient, Client
from tests.support import ROOT
from tests.support.processes import PYTHON_PATH

pytestmark = pytest.mark.process

NOBODY = "127.0.0.1:1"
WORDS = r"str is no baton\.v1 GenerateRequest; a text is GenerateRequest\(text=\.\.\.\)"


def test_the_readmes_example_says_that_nobody_is_there() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "client" / "README.md").read_text(), re.S)
    assert "127.0.0.1:50051" in program
    command = [sys.executable, "-c", program.replace("127.0.0.1:50051", NOBODY)]
    environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    process = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout.startswith("UNAVAILABLE: ")
    assert "None" not in process.stdout


def test_a_text_is_no_request() -> None:
    with Client(NOBODY, retry=ONCE) as client:
        with pytest.raises(TypeError, match=WORDS):
            client.generate("hi")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=WORDS):
            client.generate_stream("hi")  # type: ignore[arg-type]


async def test_a_text_is_no_request_of_the_asyncio_clients() -> None:
    async with AsyncClient(NOBODY, retry=ONCE) as client:
        with pytest.raises(TypeError, match=WORDS):
            await client.generate("hi")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=WORDS):
            client.generate_stream("hi")  # type: ignore[arg-type]
