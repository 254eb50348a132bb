"""Tests the console's page as such: keys, colours, a lost connection, and that it rests while nobody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.router.console.routes import POLICY
from tests.support.console_feed import STATIC, ConsoleFeed, serving, worker
from tests.support.console_page import looking

pytestmark = pytest.mark.asyncio(loop_scope="package")

LOST = ("Failed to load resource", "ERR_")


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(what)


async def test_keys_lead_to_everything(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url) as console:
        await console.show("cluster")
        await console.page.keyboard.press("Tab")
        assert await console.page.evaluate("document.activeElement.textContent") == "Skip to the content"
        await console.page.keyboard.press("Enter")
        assert await console.page.evaluate("document.activeElement.id") == "main"
        await console.page.get_by_role("link", name="Requests").press("Enter")
        await console.see("h1:has-text('Requests')")
        assert await console.page.evaluate("document.activeElement.id") == "main", "reading goes on at what is new"
        assert await console.page.title() == "Requests · Baton"
        assert await console.page.locator("nav [aria-current=page]").inner_text() == "Requests"


async def test_colours_follow_the_system_until_they_are_chosen(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url, scheme="dark") as console:
        await console.show("latency")

        async def is_dark() -> bool:
            colour = await console.page.evaluate("getComputedStyle(document.body).backgroundColor")
            return colour == "rgb(13, 17, 23)"

        assert await is_dark()
        await console.page.get_by_role("button", name="Dark colours").click()
        assert not await is_dark()
        await console.page.reload()
        await console.see("main h1")
        assert not await is_dark(), "it is kept"


async def test_a_lost_connection_is_said_and_comes_back(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url, expected=LOST) as console:
        await console.show("cluster")
        await console.see(".connection-live")
        feed.end()
        assert "connection lost: what is shown is old" in await console.text(".connection-lost")
        with serving(ConsoleFeed(feed.port)) as again:  # another process of the router at the same place
            again.hello["router"]["pid"] = 2
            again.workers.append(worker("prefill-7"))
            await console.see(".connection-live")
            await console.see("[data-worker=prefill-7]")


async def test_nothing_is_asked_while_nobody_looks(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url) as console:
        await console.page.clock.install()
        await console.show("cluster")
        await until(lambda: feed.num_viewers == 1, "the page listens")
        set_hidden = "now => { Object.defineProperty(document, 'hidden', {value: now, configurable: true}); "
        set_hidden += "document.dispatchEvent(new Event('visibilitychange')); }"
        await console.page.evaluate(set_hidden, True)
        await console.page.clock.fast_forward(31_000)
        await until(lambda: feed.num_viewers == 0, "a hidden page lets go")
        await console.page.evaluate(set_hidden, False)
        await until(lambda: feed.num_viewers == 1, "a page that is seen again listens again")


async def test_a_large_cluster_is_readable(browser: Any, feed: ConsoleFeed) -> None:
    feed.workers = [worker(f"prefill-{index}") for index in range(32)]
    feed.workers += [worker(f"decode-{index}", "decode") for index in range(32)]
    facts = {"state": "proven", "reason": "", "transport": "shm", "handoff_ms": 1.0}
    feed.pairs = [{"prefill": f"prefill-{a}", "decode": f"decode-{b}", **facts} for a in range(32) for b in range(32)]
    async with looking(browser, feed.url) as console:
        await console.show("cluster")
        assert await console.page.locator(".card").count() == 24
        await console.page.get_by_role("button", name="Show all 64 workers").click()
        await console.see("[data-worker=prefill-31]")
        assert await console.page.locator(".card").count() == 64
        assert await console.page.locator("table.pairs td").count() == 32 * 32
        assert await console.width_to_scroll() == 0


async def test_a_request_that_is_forgotten_is_said_to_be(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url, expected=LOST) as console:
        await console.show("requests/77")
        await console.see("text=The router no longer remembers this request.")


async def test_no_file_of_the_page_asks_more_than_the_policy_allows() -> None:
    """The browser says so too; this names the file."""
    assert "unsafe" not in POLICY
    pages = {path.name: path.read_text() for path in STATIC.glob("*.html")}
    assert pages.keys() == {"index.html", "login.html"}
    for name, page in pages.items():
        assert " style=" not in page, name
        assert "<style" not in page, name
        assert "://" not in page, name
        assert all("src=" in part.partition(">")[0] for part in page.split("<script")[1:]), name
    sources = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    for name, source in sources.items():
        assert "innerHTML" not in source, name
        assert "eval(" not in source, name
        assert "https://" not in source, name


async def test_a_request_is_asked_for_again_after_any_answer_but_that_it_is_forgotten(
    browser: Any, feed: ConsoleFeed
) -> None:
    """A proxy before a router that is started again answers in its place."""
    is_away = True
    async with looking(browser, feed.url, expected=LOST) as console:

        async def answer(route: Any) -> None:
            await (route.fulfill(status=502) if is_away else route.continue_())

        await console.page.route("**/console/requests/1", answer)
        await console.page.goto(f"{feed.url}#requests/1")
        await console.see("text=The router does not answer; trying again.")
        is_away = False
        await console.see(".story:has-text('prefill-0 computed the prompt')")


async def test_what_is_written_while_an_answer_comes_stays(browser: Any, feed: ConsoleFeed) -> None:
    is_written = asyncio.Event()
    async with looking(browser, feed.url) as console:
        page = console.page

        async def answer(route: Any) -> None:
            await is_written.wait()
            await route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n")

        await page.route("**/v1/chat/completions", answer)
        await console.show("playground")
        text = page.get_by_label("Message", exact=True)
        for then in ("and then?", ""):
            await text.fill("one")
            await page.get_by_role("button", name="Send").click()
            await console.see("[aria-busy=true]")
            await text.fill(then or "one")
            is_written.set()
            await console.see("button:has-text('Send')")
            assert await text.input_value() == then, "what was sent is taken away, and nothing else"
            is_written.clear()
