"""Tests the page of `baton trace --html` in Chromium, from a file: what is seen, that all names are text, that nothing
is fetched, and that it can be used by keyboard, at a phone's width, and without seeing. Skipped without a browser."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.trace_page import page
from services.cli.trace_reader import RecordedRequest, read_requests
from services.rpc.names import Attr, Span
from tests.support import ROOT

TRACE = ROOT / "docs" / "images" / "trace.jsonl"
AXE = ROOT / "tests" / "browser" / "vendor" / "axe.min.js"
HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>\u202eabc\x1b[2J"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("no Chromium is on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        # In a container, which has no sandbox for root. What is shown is ours.
        launched = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@dataclasses.dataclass
class Shown:
    tab: Any
    complaints: list[str] = dataclasses.field(default_factory=list)
    """What the console of the browser says, dialogs, and requests that are not for the file."""


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def one(requests: list[RecordedRequest], name: str = "trace.jsonl", **about: Any) -> Shown:
        path = tmp_path / "page.html"
        path.write_text(page(requests, name), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **about})
        contexts.append(context)
        shown = Shown(context.new_page())
        shown.tab.on("console", lambda message: shown.complaints.append(message.text))
        shown.tab.on("pageerror", lambda error: shown.complaints.append(str(error)))
        shown.tab.on("dialog", lambda dialog: (shown.complaints.append(dialog.message), dialog.dismiss()))
        shown.tab.on(
            "request",
            lambda each: each.url in (path.as_uri(), "data:,") or shown.complaints.append(f"asked for {each.url}"),
        )
        shown.tab.goto(path.as_uri())
        shown.tab.wait_for_selector(".waterfall")
        return shown

    yield one
    for context in contexts:
        context.close()


def recorded() -> list[RecordedRequest]:
    return read_requests(str(TRACE))


def test_the_newest_request_is_drawn_and_another_can_be_chosen(show: Any) -> None:
    shown = show(recorded())
    tab = shown.tab
    assert tab.locator("h2").first.inner_text() == "long-document"
    names = [row.inner_text().split()[0] for row in tab.locator(".wf-row > th").all()]
    assert names[0] == "baton.request"
    assert {"prefill.compute", "kv.transfer", "decode.run"} <= set(names)
    assert tab.locator(".wf-bar.wf-hidden").count() == 1
    assert "39.0 MiB of KV went from prefill-0 to decode-0 by shm" in tab.locator("main").inner_text()
    place = {}
    for kind in ("prefill", "hidden", "decode"):
        place[kind] = tab.locator(f".wf-bar.wf-{kind}").last.bounding_box()
    assert place["hidden"]["x"] > place["prefill"]["x"], "the transfer begins after the first chunk"
    assert place["decode"]["x"] + 2 >= place["prefill"]["x"] + place["prefill"]["width"]
    tab.get_by_role("button", name="greeting").press("Enter")
    assert tab.locator("h2").first.inner_text() == "greeting"
    tab.get_by_role("button", name="decode.run").click()
    assert "baton.decode.num_steps" in tab.locator(".wf-facts").inner_text()
    tab.get_by_label("Find").fill("long")
    assert tab.locator(".requests tbody tr").count() == 1
    assert shown.complaints == []


def test_the_list_is_sorted_by_what_is_asked_for(show: Any) -> None:
    tab = show(recorded()).tab
    first = tab.locator(".requests tbody th").first
    tab.get_by_role("button", name="took", exact=True).click()
    assert first.inner_text() == "long-document"
    tab.get_by_role("button", name="took", exact=True).click()
    assert first.inner_text() == "greeting"
    assert tab.locator("th[aria-sort=ascending]").inner_text().startswith("took")


def test_hostile_names_are_text(show: Any) -> None:
    (request,) = [each for each in recorded() if each.request_id == "long-document"]
    spans = []
    for span in request.spans:
        about = {**span.attributes, Attr.WORKER: HOSTILE, HOSTILE: HOSTILE, Attr.REQUEST_MODEL: HOSTILE}
        name = span.name if span is request.root else f"{span.name} {HOSTILE}"
        spans.append(dataclasses.replace(span, attributes=about, name=name, instance=HOSTILE, message=HOSTILE))
    root = next(span for span in spans if span.name == Span.REQUEST)
    root = dataclasses.replace(root, failed=True)
    spans = [root if span.name == Span.REQUEST else span for span in spans]
    hostile = dataclasses.replace(request, request_id=HOSTILE, trace_id=HOSTILE, root=root, spans=tuple(spans))
    shown = show([hostile], HOSTILE)
    for button in shown.tab.locator(".wf-row button").all():
        button.click()
    shown.tab.wait_for_timeout(100)
    assert shown.complaints == []
    assert shown.tab.locator("main img, main script").count() == 0
    assert "owned" not in shown.tab.title().partition("<img")[0]
    text = shown.tab.locator("main").inner_text()
    assert text.count("onerror=") > len(spans)
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "\\u{202e}" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_it_fits_every_screen_and_whoever_does_not_see(show: Any, scheme: str, width: int) -> None:
    shown = show(recorded(), color_scheme=scheme, viewport={"width": width, "height": 800})
    tab = shown.tab
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in back.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness > 384) == (scheme == "light")
    tab.evaluate(AXE.read_text())
    found = tab.evaluate("axe.run()")
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
