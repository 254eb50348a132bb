"""Provides a browser for the console's tests: Chromium, driven by Playwright. Without either they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.console_feed import ConsoleFeed, serving

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Any]:
    playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
    executable = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if executable is None:
        pytest.skip("no Chromium is on this machine (apt-get install chromium)")
    async with playwright.async_playwright() as driver:
        # In a container, which has no sandbox for root. What is shown is ours.
        launched = await driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        await launched.close()


@pytest.fixture
def feed() -> Iterator[ConsoleFeed]:
    with serving(ConsoleFeed()) as feed:
        yield feed
