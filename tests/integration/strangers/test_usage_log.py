"""Tests that a usage log has what clients are told, with real workers, and that a killed router loses a second."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import httpx2

from services.cli.usage import UsageSums
from tests.support.cluster import greedy_request, running_cluster
from tests.support.models import tiny_model
from tests.support.real_cluster import Service, lone_router
from tests.support.tenants import TenantsFile
from tests.support.workers import DECODE, PREFILL

PROMPT = [201 + n % 50 for n in range(64)]
STATED_S = 1.0


async def ask(http: httpx2.AsyncClient, file: TenantsFile) -> None:
    """Asks for what the tenant may not have: no worker is needed to count that."""
    reply = await http.post("/v1/completions", json={"model": "nowhere", "prompt": "x"}, headers=file.headers("narrow"))
    assert reply.status_code == 403


def counted(path: Path) -> tuple[int, int]:
    """Returns how many requests the log has, and how many lines are torn."""
    sums = UsageSums()
    sums.add(path.read_bytes().splitlines(keepends=True))
    assert sums.num_doubled == 0
    return sum(of.outcomes["model_not_allowed"] for of in sums.sums.values()), sums.num_unreadable


def client(router: Service) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=10.0, trust_env=False)


async def test_the_log_says_what_clients_are_told(tmp_path: Path) -> None:
    """Several answers share one prompt, which counts once; a second request finds it cached."""
    path = tmp_path / "usage.jsonl"
    model, told = tiny_model("llama", tmp_path / "model"), []
    async with running_cluster(model, [PREFILL, DECODE], router={"usage_log": str(path)}) as cluster:
        for num_answers in (2, 3):
            call = cluster.inference.GenerateStream(greedy_request(PROMPT, 5, n=num_answers))
            usages = [event.completion.usage async for event in call if event.HasField("completion")]
            assert len(usages) == num_answers
            told.append(
                tuple(
                    sum(getattr(usage, name) for usage in usages)
                    for name in ("prompt_tokens", "cached_tokens", "output_tokens")
                )
            )
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [(entry["prompt_tokens"], entry["cached_tokens"], entry["output_tokens"]) for entry in entries]
    assert logged == told == [(64, 0, 10), (64, 48, 15)]


async def test_a_killed_router_loses_at_most_the_last_second(tmp_path: Path) -> None:
    file, path = TenantsFile(tmp_path), tmp_path / "usage.jsonl"
    file.write(narrow={"models": ["another"]})
    flags = [f"--tenants={file.path}", f"--usage-log={path}"]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    ended_s: list[float] = []
    async with lone_router(folders[0], *flags) as router, client(router) as http:
        for _ in range(150):
            await ask(http, file)
            ended_s.append(time.monotonic())
            await asyncio.sleep(0.015)
        killed_s = time.monotonic()
        await router.kill()
    num_due = sum(each < killed_s - STATED_S for each in ended_s)
    assert num_due > 20
    num_written, num_torn = counted(path)
    assert num_due <= num_written <= len(ended_s)
    assert num_torn <= 1
    async with lone_router(folders[1], *flags) as router, client(router) as http:
        await ask(http, file)
        async with asyncio.timeout(10.0):
            while counted(path)[0] == num_written:  # noqa: ASYNC110  # only the file tells
                await asyncio.sleep(0.05)
    assert counted(path) == (num_written + 1, num_torn), "its ids are others"
