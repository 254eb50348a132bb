"""Tests the playground of a router with tenants: it asks for an API key, sends it, and keeps it nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.console_page import looking
from tests.support.tenants import TenantsFile, serving
from tests.support.text_model import write_model

pytestmark = pytest.mark.asyncio(loop_scope="package")

TOKEN = "open-sesame-2f6fde"
KEPT = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href, document.body.outerHTML])"


async def test_the_playground_asks_for_a_key_and_forgets_it_with_the_page(browser: Any, tmp_path: Path) -> None:
    token, file = tmp_path / "token", TenantsFile(tmp_path)
    token.write_text(TOKEN)
    token.chmod(0o600)
    file.write(acme={})
    key = file.keys["acme"]
    async with serving(str(write_model(tmp_path / "model")), file, console_token_file=str(token)) as cluster:
        for role in ("prefill", "decode"):
            await cluster.add(role)
        url = f"http://127.0.0.1:{cluster.router.http_port}/"
        async with looking(browser, url, expected=("401",)) as console:
            page = console.page
            await page.goto(url)
            await page.get_by_label("Token").fill(TOKEN)
            await page.get_by_role("button", name="Log in").click()
            await console.see("h1:has-text('Cluster')")
            await console.show("playground")
            assert await console.barriers() == []
            await page.locator("textarea").first.fill("hello")
            await page.get_by_role("button", name="Send").click()
            assert "no API key was given" in await console.text("[role=alert]")
            await page.get_by_label("API key").fill(f" {key} ")
            await page.get_by_role("button", name="Begin anew").click()
            await page.get_by_role("button", name="Send").click()
            await console.see(".answered:has-text('ended: stop')")
            await console.see(".beside .story")  # the router calls the request acme/…, and the page finds it
            for name in ("curl", "Python", "grpcurl"):
                await page.get_by_role("button", name=name, exact=True).click()
                assert "BATON_API_KEY" in await page.locator(".snippets pre").inner_text()
            assert key not in await page.evaluate(KEPT)
            await page.reload()
            await console.show("playground")
            assert await page.get_by_label("API key").input_value() == ""
