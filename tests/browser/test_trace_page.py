"""Tests the page that `baton trace FILE --open` writes, in a browser: the console's waterfall, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.trace_page import page
from services.cli.trace_reader import read_requests
from tests.support import ROOT
from tests.support.console_page import looking

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
async def test_a_trace_file_as_a_page(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    requests = read_requests(str(ROOT / "docs/images/trace.jsonl"))
    file = tmp_path / "trace.html"
    file.write_text(page(requests, "trace.jsonl"), encoding="utf-8")
    async with looking(browser, file.as_uri(), scheme=scheme, width=width) as console:
        await console.page.goto(console.url)
        await console.see(".waterfall .wf-bar.wf-prefill")
        await console.see(".wf-row:has-text('kv.transfer') .wf-bar.wf-transfer")
        assert await console.barriers() == []
        assert await console.width_to_scroll() == 0
        await console.keep(f"trace-page-{scheme}-{width}")
