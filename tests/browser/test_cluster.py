"""Tests the console over a cluster of real processes, under load, and with a worker killed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from benchmarks.ports import free_ports
from tests.support.cluster import greedy_request
from tests.support.console_feed import HOSTILE
from tests.support.console_page import VIEWS, ConsolePage, looking
from tests.support.models import tiny_model
from tests.support.patience import HANG_S, Patience
from tests.support.processes import environment
from tests.support.real_cluster import RealCluster, Status, real_cluster

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.process, pytest.mark.long]

WORKERS = ("prefill-0", "decode-0", "decode-1")
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--kv-blocks", "256", "--max-num-batched-tokens", "64"),
    *("--transport", "shm"),  # a probe on a busy machine may find another one faster
)
PATIENT = ("--no-worker-timeout-s", "240", "--queue-timeout-s", "600")
LOAD = 4
TOKEN = "open-sesame-2f6fde"
PROMPT_TOKENS, OUTPUT_TOKENS = 300, 100


class Served(NamedTuple):
    cluster: RealCluster
    url: str
    """Of the console of the first router."""
    guarded_url: str
    """Of that of the second, which asks for a token."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Yields a cluster of two routers, each with a console."""
    # Many thin layers: quick to load, slow enough to be seen in each phase.
    model = tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=6, max_position_embeddings=4096)
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    port, guarded = free_ports(2)
    routers = (
        (*PATIENT, "--http-port", str(port), "--log-prompts", "--jaeger-url", "http://jaeger.example:16686"),
        (*PATIENT, "--http-port", str(guarded), "--console-token-file", str(token)),
    )
    async with real_cluster(model, tmp_path_factory.mktemp("temp"), WORKERS, *FLAGS, routers=routers) as cluster:
        yield Served(cluster, f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{guarded}/")


@contextlib.asynccontextmanager
async def load(cluster: RealCluster, output_tokens: int = OUTPUT_TOKENS) -> AsyncIterator[None]:
    """Keeps requests running while the context is open; every one of them ends well."""

    async def ask(lane: int) -> None:
        for number in range(10**6):
            prompt = [3 + (lane * 31 + number * 7 + index) % 300 for index in range(PROMPT_TOKENS)]
            await cluster.router.stream(greedy_request(prompt, output_tokens, request_id=f"load-{lane}-{number}"))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(lane)) for lane in range(LOAD)]
        yield
        for task in tasks:
            task.cancel()


def decodes(status: Status, name: str) -> bool:
    return any(each.load.num_running > 0 for each in status.workers if each.worker.worker_id == name)


def escaped(text: str) -> str:
    """Returns it with controls as the page writes them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\u{{{ord(found[0]):x}}}", text)


async def number_in(console: ConsolePage, selector: str) -> float:
    return float((await console.text(selector)).replace(",", ""))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_under_load(browser: Any, served: Served, scheme: str) -> None:
    cluster, url = served.cluster, served.url
    async with looking(browser, url, scheme=scheme, width=1100) as console, load(cluster):
        await console.show("requests")
        await console.see("tbody tr:has-text('load-'):has-text('length')")
        ended = await (await console.see("tbody tr:has-text('length') th a")).get_attribute("href")
        assert ended is not None
        for view in (*VIEWS[:2], ended[1:], *VIEWS[3:]):
            await console.show(view)
            assert await console.barriers() == []
            await console.keep(f"real-{view.replace(ended[1:], 'request')}-{scheme}")
            match view:
                case "cluster":
                    assert await console.page.locator(".card .state-ready").count() == len(WORKERS)
                    assert re.search(r"prefill-0 computed the prompt .* nobody hid", await console.text(".newest"))
                    await console.see("table.pairs td:has-text('proven'):has-text('shared memory'):has-text('iB/s')")
                    await console.see(".moves:has-text('prefill-0'):has-text('arrived')")
                    if scheme == "dark":
                        await console.document("cluster", 760)
                case "latency":
                    assert await number_in(console, "section[aria-labelledby=ttft-title] tbody td >> nth=0") > 0
                    await console.see("section[aria-labelledby=itl-title] tbody td:has-text('ms')")
                case _ if view == ended[1:]:
                    story = await console.text(".story")
                    assert "its KV (" in story
                    assert "over shared memory" in story
                    await console.see(".wf-track .wf-decode")
                    await console.see("h3:has-text('Decode on decode-')")
                    link = await (await console.see("text=Open in Jaeger")).get_attribute("href")
                    assert re.fullmatch(r"http://jaeger\.example:16686/trace/[0-9a-f]{32}", link)
                    async with console.page.expect_download() as download:
                        await console.page.get_by_text("Download as OTLP JSON").click()
                    assert (await download.value).suggested_filename.endswith(".json")
                    if scheme == "light":
                        await console.document("request", 680)


async def replayed_from(console: ConsolePage, url: str, worker: str) -> str:
    """Returns the link of a finished request whose decode on `worker` was lost, once there is one. Others may have been
    placed again for other reasons, and finish first."""
    patience = Patience(HANG_S)
    while not patience.is_over():
        links = console.page.locator("tbody tr:has-text('length') th a")
        for href in await links.evaluate_all("links => links.map((link) => link.getAttribute('href'))"):
            answer = await console.page.request.get(f"{url}console/{href.removeprefix('#')}")
            stages = (await answer.json())["row"]["stages"]
            if any((each["name"], each["worker"], each["outcome"]) == ("decode", worker, "lost") for each in stages):
                return str(href)
        await asyncio.sleep(0.2)
    raise AssertionError(f"no finished request lost its decode on {worker}")


async def test_a_killed_worker_and_the_replay_of_what_ran_there(browser: Any, served: Served) -> None:
    cluster, url = served.cluster, served.url
    async with looking(browser, url) as console:
        await console.show("cluster")
        # What decodes there must not end between the look and the kill.
        async with cluster["decode-1"].slowed(), load(cluster, output_tokens=600):
            await console.see(".card[data-worker=decode-1] .facts:not(:has-text('0 running'))")
            await cluster.router.until(lambda status: decodes(status, "decode-1"), "a decode on decode-1", 60.0)
            await cluster["decode-1"].kill()
            await console.see(".card[data-worker=decode-1] .state-down")
            assert await console.text(".card[data-worker=decode-1] .reason")
            await console.keep("real-cluster-killed")
            await console.page.get_by_role("link", name="Requests").click()
            await console.page.get_by_label("placed again").check()
            await console.page.locator(f"th a[href='{await replayed_from(console, url, 'decode-1')}']").click()
            assert "the decode on decode-1 was given up (lost)" in await console.text(".story-fault")
            await console.see("tr.wf-bad:has-text('lost')")
            await console.keep("real-request-replayed")
        await cluster.whole()
        await console.show("cluster")
        await console.see(".card[data-worker=decode-1] .state-ready")


async def test_who_has_no_token_sees_a_login_and_nothing_else(browser: Any, served: Served) -> None:
    async with looking(browser, served.guarded_url, expected=("401",)) as console:
        page = console.page
        await page.goto(served.guarded_url)
        await console.see("text=whoever has its token")
        assert await console.barriers() == []
        assert (await page.request.get(f"{served.guarded_url}console/events")).status == 401
        await page.get_by_label("Token").fill("open-sesame")
        await page.get_by_role("button", name="Log in").click()
        assert await console.text("[role=alert]") == "That is not the token."
        await console.keep("real-login")
        await page.get_by_label("Token").fill(TOKEN)
        await page.get_by_role("button", name="Log in").press("Enter")
        await console.see("h1:has-text('Cluster')")
        await console.see(".card[data-worker=prefill-0]")
        (cookie,) = await page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert TOKEN not in cookie["value"]
        # Who is logged out meanwhile is asked again, and is not left with what was.
        await page.context.clear_cookies()
        await page.goto(f"{served.guarded_url}#requests/1")
        await console.see("text=whoever has its token")


async def test_the_playground_asks_stops_and_tells(browser: Any, served: Served) -> None:
    url = served.url
    async with looking(browser, url) as console:
        page = console.page
        await console.show("playground")
        await page.locator("textarea").first.fill(f"{HOSTILE} and on it goes")
        await page.get_by_text("Sampling, seed").click()
        await page.get_by_label("Most tokens").fill("24")
        await page.get_by_label("Seed").fill("7")
        await page.get_by_role("button", name="Send").click()
        await console.see("text=ended:")
        assert "gnp.exe" in await console.text(".asked")
        answer = await page.locator(".answer").inner_text()
        await page.locator(".token:not(:empty)").first.hover()
        assert "logprob" in await console.text(".chances")
        await page.locator(".answer").press("ArrowRight")
        assert "likeliest" in await console.text(".chances")
        await console.see(".beside .story:has-text('its KV (')")
        await console.see(".beside .wf-track .wf-decode")
        assert await console.barriers() == []
        await console.keep("real-playground")
        assert await page.evaluate("window.hacked") is None
        # The same seed gives the same answer again; nothing of the first turn is left.
        await page.get_by_role("button", name="Begin anew").click()
        await page.locator("textarea").first.fill(f"{HOSTILE} and on it goes")
        await page.get_by_role("button", name="Send").click()
        await console.see("text=ended:")
        assert await page.locator(".answer").inner_text() == answer
        # What runs is stopped, at the router too.
        await page.get_by_role("button", name="Begin anew").click()
        await page.locator("textarea").first.fill("Once upon a time")
        await page.get_by_label("Most tokens").fill("3500")
        await page.get_by_label("Least tokens").fill("3500")  # it must not end by itself before it is stopped
        await page.get_by_role("button", name="Send").click()
        await console.see(".token:not(:empty)")
        # By the keyboard: the answer grows above the button, which a pointer may miss.
        await page.get_by_role("button", name="Stop").press("Enter")
        await console.see(".answered:has-text('stopped')")
        await console.see(".beside:has-text('It ended as cancelled')")
        # What is refused is said.
        await page.get_by_label("Least tokens").fill("")
        await page.get_by_label("Most tokens").fill("100000")
        await page.locator("textarea").first.fill("More")
        await page.get_by_role("button", name="Send").click()
        assert "100000" in await console.text("[role=alert]")
        console.problems = [each for each in console.problems if "400" not in each]


@pytest.mark.parametrize("mode", ["Chat", "Completion"])
async def test_the_same_call_elsewhere_gives_the_same_answer(
    browser: Any, served: Served, mode: str, tmp_path: Any
) -> None:
    url = served.url
    async with looking(browser, url) as console:
        page = console.page
        await console.show("playground")
        await page.get_by_role("button", name=mode, exact=True).click()
        await page.locator(".ask textarea").first.fill('It\'s "quoted" \\ $HOME `x` \u202e \U0001f600\nand goes on')
        await page.get_by_text("Sampling, seed").click()
        for label, value in (
            ("Most tokens", "12"),
            ("Least tokens", "12"),
            ("Temperature", "0.7"),
            ("Top k", "40"),
            ("Seed", "11"),
        ):
            await page.get_by_label(label, exact=True).fill(value)
        await page.get_by_label("Log-probabilities").uncheck()
        snippets = {}
        for name in ("curl", "Python", "grpcurl"):
            await page.get_by_role("button", name=name, exact=True).click()
            snippets[name] = await page.locator(".snippets pre").inner_text()
        await page.get_by_role("button", name="Send").click()
        await console.see("text=ended:")
        answer = (await page.locator(".answer").inner_text()).strip()

    async def output(*command: str) -> str:
        running = asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True, timeout=60, env=environment(tmp_path)
        )
        return (await running).stdout

    assert escaped(await output(sys.executable, "-c", snippets["Python"])).strip() == answer
    # A shell takes them as they are: the bodies are read, as curl and grpcurl would.
    for name in ("curl", "grpcurl"):
        shell = f'{name}() {{ for each; do case "$each" in "{{"*) printf %s "$each";; esac; done; }}\n{snippets[name]}'
        body = await output("bash", "-c", shell)
        assert 'It\'s \\"quoted\\"' in body
        assert '"seed":11' in body
