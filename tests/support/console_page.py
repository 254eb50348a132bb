"""Looks at the console in a browser, and at what nobody sees: errors, requests to other hosts, what keeps people out.

Owns: how a page is opened and watched. Never: what a test expects to see on it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator
from typing import Any

from tests.support import ROOT

PICTURES = ROOT / "out/console"
DOCS = ROOT / "docs/images"
VIEWS = ("cluster", "requests", "requests/1", "latency", "playground")
WAIT_MS = 60_000
_AXE = ROOT / "tests/browser/vendor/axe.min.js"
_LOUD = ("serious", "critical")


class ConsolePage:
    """Shows one page of a console. `page` is Playwright's."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda request: self._note(not self._is_ours(request.url), f"asks {request.url}"))

    def _note(self, is_wrong: bool, what: str) -> None:
        if is_wrong:
            self.problems.append(what)

    def _is_ours(self, url: str) -> bool:
        return url.startswith((self.url, "data:", f"blob:{self.url}"))

    async def show(self, view: str, heading: str = "") -> None:
        """Shows a view, and returns when it is there."""
        await self.page.goto(f"{self.url}#{view}", wait_until="load")
        await self.see(f"h1:has-text('{heading}')" if heading else "main h1")
        await self.page.locator("main .loading").wait_for(state="detached", timeout=WAIT_MS)

    async def see(self, selector: str) -> Any:
        """Returns the first element that is like that, as soon as there is one to see."""
        found = self.page.locator(selector).first
        await found.wait_for(timeout=WAIT_MS)
        return found

    async def text(self, selector: str = "body") -> str:
        return " ".join((await (await self.see(selector)).inner_text()).split())

    async def barriers(self) -> list[str]:
        """Returns what axe-core finds that keeps people from using what is shown now."""
        await self.page.evaluate(_axe())
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert found["passes"], "axe looked at nothing"
        return [
            f"{each['id']}: {node['target']} {node['failureSummary']}"
            for each in found["violations"]
            if each["impact"] in _LOUD
            for node in each["nodes"]
        ]

    async def width_to_scroll(self) -> int:
        """Returns by how many pixels the page is wider than the window."""
        return await self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    async def keep(self, name: str) -> None:
        """Keeps a picture in out/console."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=PICTURES / f"{name.replace('/', '-')}.png", full_page=True)

    async def document(self, name: str, height: int) -> None:
        """Keeps a picture for docs/ if the environment asks for it: BATON_DOCS_PICTURES=1."""
        if os.environ.get("BATON_DOCS_PICTURES") == "1":
            size = self.page.viewport_size
            clip = {"x": 0, "y": 0, "width": size["width"], "height": height}
            await self.page.screenshot(path=DOCS / f"console-{name}.png", full_page=True, clip=clip)


@functools.cache
def _axe() -> str:
    return _AXE.read_text(encoding="utf-8")


@contextlib.asynccontextmanager
async def looking(
    browser: Any, url: str, *, scheme: str = "light", width: int = 1280, expected: tuple[str, ...] = (), **context: Any
) -> AsyncIterator[ConsolePage]:
    """Opens a page. At the end nothing has gone wrong in it but what is `expected`, and it has asked no other host."""
    opened = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, **context)
    try:
        console = ConsolePage(await opened.new_page(), url)
        yield console
        wrong = [each for each in console.problems if not any(words in each for words in expected)]
        assert wrong == []
    finally:
        await opened.close()
