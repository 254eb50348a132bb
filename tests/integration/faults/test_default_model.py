"""Tests the default model in float32 under `kill -9`: its streams go on with the tokens that no
fault would have given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL
from tests.integration.faults.conftest import ALL, WORKERS
from tests.support import ROOT
from tests.support.equality import GreedyReference
from tests.support.phases import Phase, decoding, prefilling, reach, strike
from tests.support.real_cluster import RealCluster, real_cluster
from tests.support.streams import Job, streams

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.default_model,
]

FLAGS = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "160", "--max-num-batched-tokens", "64")
LENGTHS = (700, 300, 200)
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[tuple[int, ...]]:
    """Returns prompts of real text."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return [tuple(ids[7 * number : 7 * number + length]) for number, length in enumerate(LENGTHS)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    temp = tmp_path_factory.mktemp("temp")
    async with real_cluster(model, temp, WORKERS, *FLAGS, routers=((*ALL, "--silence-s", "20"),)) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: RealCluster) -> AsyncIterator[RealCluster]:
    await shared.whole()
    yield shared
    await shared.whole()
    await shared.idle()


@pytest.mark.parametrize("phase", [prefilling, decoding])
async def test_killed(
    cluster: RealCluster, reference: GreedyReference, prompts: list[tuple[int, ...]], phase: Phase
) -> None:
    salts = iter(range(100))

    async def attempt() -> bool:
        salt = f"{phase.__name__} {next(salts)}"  # or the prompts would be in the prefix caches
        jobs = [Job(prompt, MAX_TOKENS, cache_salt=salt) for prompt in prompts]
        async with streams(cluster.router, reference, jobs) as running:
            victim = await reach(cluster, phase, running)
            await cluster.restart(victim)
        assert victim.startswith("prefill" if phase is prefilling else "decode")
        return running.num_retries > 0

    await strike(attempt)
