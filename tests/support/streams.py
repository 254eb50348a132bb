"""Runs client streams beside a fault, and checks each against the model itself.

Owns: what is asked, and that every answer is exactly what no fault would have given. Never: the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from baton.v1 import inference_pb2, types_pb2
from services.core.seeds import answer_seed
from tests.support import patience
from tests.support.cluster import Answer
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE
from tests.support.real_cluster import RealCluster, RouterClient

_RANDOM = random.Random(1)
_THINK_S = 0.2
ENDLESS = r"(\([a-h ]{1,9}\)|[p-z]{2,5}[0-9]|, )*"
"""What may follow depends on what came before, and always something may."""
MIN_ASKED = 3
"""By each client that keeps asking."""


@dataclass(frozen=True, slots=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    """None: greedy."""
    cache_salt: str = ""
    """Its own, or its prompt may be in a prefix cache; empty for none."""
    pattern: str = ""
    """A regular expression that the output is held to; it has no end."""
    num_answers: int = 1

    def request(self) -> inference_pb2.GenerateRequest:
        sampling = types_pb2.SamplingParams(temperature=0.0)
        if self.seed is not None:
            sampling = types_pb2.SamplingParams(temperature=1.0, seed=self.seed)
        constraint = types_pb2.Constraint(regex=self.pattern) if self.pattern else None
        return inference_pb2.GenerateRequest(
            n=self.num_answers,
            constraint=constraint,
            token_ids=inference_pb2.TokenIds(ids=self.prompt),
            sampling=sampling,
            stopping=types_pb2.StoppingParams(max_tokens=self.max_tokens, ignore_eos=True),
            cache_salt=self.cache_salt or None,
        )

    def check(self, reference: GreedyReference, answer: Answer, index: int = 0) -> None:
        """Asserts that nothing is lost, repeated or changed in the answer with this index."""
        assert len(answer.token_ids) == self.max_tokens
        assert answer.completion is not None
        assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert answer.completion.usage.output_tokens == self.max_tokens
        seed = None if self.seed is None else answer_seed(self.seed, index)
        reference.check_at_once(self.prompt, answer.token_ids, seed=seed, pattern=self.pattern)


def mixed_jobs(rng: random.Random, num_jobs: int, prompt_tokens: range, output_tokens: range) -> list[Job]:
    """Returns jobs of which one in four is sampled, and one in four constrained; one in four may find its prompt in a
    prefix cache."""
    shared = tuple(rng.choices(range(3, VOCAB_SIZE), k=prompt_tokens.stop))
    jobs = []
    for number in range(num_jobs):
        length = rng.choice(prompt_tokens)
        cached = number % 4 == 1
        prompt = shared[:length] if cached else tuple(rng.choices(range(3, VOCAB_SIZE), k=length))
        seed = rng.getrandbits(63) if number % 4 == 3 else None
        salt = "" if cached else f"{rng.getrandbits(64):x}"
        pattern = ENDLESS if rng.random() < 0.25 else ""
        jobs.append(Job(prompt, rng.choice(output_tokens), seed, salt, pattern))
    return jobs


class Missed(Exception):
    """The streams were over before what a test waits for was seen."""


class Streams:
    """Jobs under way."""

    def __init__(self, router: RouterClient, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.tasks = [asyncio.create_task(router.several(job.request())) for job in jobs]
        self.answers: list[list[Answer]] = []

    async def any_done(self) -> None:
        await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)

    async def all_done(self, within_s: float) -> None:
        await patience.all_done(self.tasks, within_s)

    @property
    def are_done(self) -> bool:
        return all(task.done() for task in self.tasks)

    @property
    def num_retries(self) -> int:
        """Times that requests were placed again, in all; when they have ended."""
        ends = [answer.completion for answers in self.answers for answer in answers]
        return sum(end.workers.retries for end in ends if end is not None)


@contextlib.asynccontextmanager
async def streams(router: RouterClient, reference: GreedyReference, jobs: Sequence[Job]) -> AsyncIterator[Streams]:
    """Starts streams at entry; at the end of the block all are waited for and checked, also if it missed something."""
    running = Streams(router, jobs)
    missed: Missed | None = None
    try:
        try:
            yield running
        except Missed as error:
            missed = error
        running.answers = await asyncio.gather(*running.tasks)
    finally:
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
    for job, answers in zip(jobs, running.answers, strict=True):
        for index, answer in enumerate(answers):
            job.check(reference, answer, index)
    if missed is not None:
        raise missed


@contextlib.asynccontextmanager
async def load(
    cluster: RealCluster, reference: GreedyReference, *, num_jobs: int = 10, router: int = 0
) -> AsyncIterator[Streams]:
    """Runs streams of many sizes, more than the pools of two small workers hold. Two have
    three answers each, sampled ones and greedy ones."""
    jobs = mixed_jobs(_RANDOM, num_jobs, range(150, 550), range(50, 100))
    jobs = [replace(job, num_answers=3 if number in (3, 4) else 1) for number, job in enumerate(jobs)]
    async with streams(cluster.routers[router], reference, jobs) as running:
        yield running


async def keep_asking(router: RouterClient, reference: GreedyReference, until: asyncio.Event, num_clients: int) -> int:
    """Clients that each ask one thing after another, and think a little in between: the machine is to have time for
    what else the test does. Every answer is checked; returns how many there were."""

    async def client() -> int:
        count = 0
        while not until.is_set() or count < MIN_ASKED:
            [job] = mixed_jobs(_RANDOM, 1, range(20, 300), range(10, 60))
            job.check(reference, await router.stream(job.request()))
            count += 1
            await asyncio.sleep(_THINK_S)
        return count

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client()) for _ in range(num_clients)]
    return sum(task.result() for task in clients)
