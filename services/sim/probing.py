"""Measures a cluster that does nothing else by sending requests to its router, and timing what comes back.

Owns: what is sent, and when. Never: what the timings mean (`services/sim/fitting.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from baton_client import AsyncClient
from services.core.errors import BatonError
from services.sim.fitting import StepTimings
from services.sim.trace import NUM_TOKEN_IDS, random_tokens

_PROMPTS = (8, 32, 64, 128, 256, 512, 1024, 1536)
_BATCHES = (1, 2, 4, 8, 16)
_SHORT, _LONG = 48, 1024
_LONG_BATCH = 4
_GAPS = 24
_SATURATING = 8
"""Prompts that wait for one another, of each size in each round."""
_STREAM_TOKENS = 400
"""Tokens of each stream beside them: it lasts longer than the prompts, or they end with it."""

Times = list[float]


@dataclass
class _Answer:
    times_s: Times
    """The time after which each token came."""
    computed_ms: float = 0.0
    """Milliseconds that the worker took to compute the prompt, of the time to the first token."""

    @property
    def around_ms(self) -> float:
        """Returns the rest of the time to the first token."""
        return max(0.0, self.times_s[0] * 1e3 - self.computed_ms)


class Probe:
    def __init__(
        self,
        client: AsyncClient,
        model: str,
        context_tokens: int,
        vocab_size: int,
        workers: tuple[int, int],
    ) -> None:
        """`workers` are how many take prompts, and how many decode: the load is for each of them."""
        self._client = client
        self._model = model
        self._context_tokens = context_tokens
        self.doing = "the first requests"
        """What it measures now, for people."""
        self._vocab_size = vocab_size
        self._num_prefill, self._num_decode = workers
        self._num_asked = 0

    async def measure(self, timings: StepTimings, *, handed_over: bool) -> None:
        """Adds measurements to `timings` until it is cancelled. `handed_over` says that prompts leave the workers that
        compute them: then it is measured what that takes of these workers, and, if there are `timings.beside_streams`,
        while the others compute on the same host.

        Each round measures everything, so that a machine that is slower for some seconds is so for all figures.
        """
        for _ in range(2):
            await self._answer(64, 8)  # whatever happens only once has happened
        for number in itertools.count(1):
            await self._prompts_alone(timings, f"round {number}: prompts alone")
            for streams, length in [*((streams, _SHORT) for streams in _BATCHES), (_LONG_BATCH, _LONG)]:
                if length + _GAPS * 3 < self._context_tokens:
                    self.doing = f"round {number}: {streams} streams"
                    gaps = await self._streams(streams * self._num_decode, length)
                    timings.decode_ms.setdefault((streams, length + 2 * _GAPS), []).extend(gaps)
            if not handed_over:
                continue
            self.doing = f"round {number}: prompts that wait for one another"
            for size in (64, 512):
                if size < self._context_tokens - 1:
                    ms, gaps = await self._saturated(size, self._num_decode * timings.beside_streams)
                    timings.saturated_ms.setdefault(size, []).append(ms)
                    timings.beside_ms.extend(gaps)

    async def _prompts_alone(self, timings: StepTimings, doing: str) -> None:
        self.doing = doing
        for size in _PROMPTS:
            if size >= self._context_tokens - 1:
                continue
            answer = await self._answer(size, 3 if size <= 512 else 1)
            timings.prefill_ms.setdefault(size, []).append(answer.computed_ms)
            timings.around_ms.append(answer.around_ms)
            if len(answer.times_s) > 1:
                timings.second_ms.setdefault(size, []).append((answer.times_s[1] - answer.times_s[0]) * 1e3)

    async def _answer(self, num_prompt_tokens: int, num_output_tokens: int) -> _Answer:
        self._num_asked += 1
        prompt = random_tokens(("probe", self._num_asked), num_prompt_tokens, min(NUM_TOKEN_IDS, self._vocab_size))
        request = inference_pb2.GenerateRequest(
            model=self._model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stopping=types_pb2.StoppingParams(max_tokens=num_output_tokens, ignore_eos=True),
        )
        answer, began_s = _Answer([]), time.perf_counter()
        async for event in self._client.generate_stream(request):
            if event.WhichOneof("event") == "chunk":
                answer.times_s += [time.perf_counter() - began_s] * len(event.chunk.token_ids)
            elif event.WhichOneof("event") == "completion":
                answer.computed_ms = event.completion.timings.prefill_compute_ms
            if len(answer.times_s) > num_output_tokens:
                break
        if not min(2, num_output_tokens) <= len(answer.times_s) <= num_output_tokens:
            raise BatonError(f"an answer had {len(answer.times_s)} tokens, of {num_output_tokens} that were asked for")
        return answer

    async def _streams(self, number: int, length: int) -> Times:
        """Returns the gaps, in milliseconds, while as many streams run at once as were asked for."""
        output = _GAPS + number * 8
        streams = await asyncio.gather(*(self._absolute(length, output) for _ in range(number)))
        # The first gap of a stream holds its handoff.
        all_run_s, first_end_s = max(times[1] for times in streams), min(times[-1] for times in streams)
        return [
            (now - before) * 1e3
            for times in streams
            for before, now in itertools.pairwise(times)
            if before >= all_run_s and now <= first_end_s
        ]

    async def _saturated(self, size: int, num_streams: int) -> tuple[float, Times]:
        """Returns the milliseconds from one prompt's first token to the next one's, of prompts that are handed over and
        of which another always waits; and the gaps between tokens of streams meanwhile, in milliseconds."""
        output = min(_STREAM_TOKENS, self._context_tokens - _SHORT - 1)
        streams = [asyncio.create_task(self._absolute(_SHORT, output)) for _ in range(num_streams)]
        await self._absolute(_SHORT, 8)  # until they all run
        ended, firsts, most = asyncio.Event(), Times(), _SATURATING * self._num_prefill

        async def prompts() -> None:
            while not ended.is_set():
                firsts.append((await self._absolute(size, 2))[0])
                if len(firsts) >= most or any(stream.done() for stream in streams):
                    ended.set()

        await asyncio.gather(*(prompts() for _ in range(2 * self._num_prefill)))
        firsts.sort()
        running = await asyncio.gather(*streams)
        began_s, ended_s = firsts[0], firsts[-1]
        gaps = [
            (now - before) * 1e3
            for times in running
            for before, now in itertools.pairwise(times)
            if began_s <= before and now <= ended_s
        ]
        return self._num_prefill * (ended_s - began_s) * 1e3 / (len(firsts) - 1), gaps

    async def _absolute(self, length: int, output: int) -> Times:
        """Returns the moments at which each token came."""
        now = time.perf_counter()
        return [now + at_s for at_s in (await self._answer(length, output)).times_s]


async def probe(
    dial: Callable[[], AsyncClient],
    model: str,
    context_tokens: int,
    vocab_size: int,
    workers: tuple[int, int],
    *,
    handed_over: bool,
    beside: bool,
    within_s: float,
    tell: Callable[[str, float], None],
) -> StepTimings:
    """Returns what is measured of the cluster behind a router's public port in that time, or until the task is
    cancelled. `beside` says that all workers are on one host.

    `dial` gives a client of it, on the event loop. `tell` hears each second what is measured, and for how long it has
    been at work. Raises the client's errors.
    """
    timings = StepTimings({}, {}, beside_streams=_LONG_BATCH if beside else 0)
    async with dial() as client:
        probe = Probe(client, model, context_tokens, vocab_size, workers)
        telling = asyncio.create_task(_tell(probe, tell))
        try:
            async with asyncio.timeout(within_s):
                await probe.measure(timings, handed_over=handed_over)
        except (TimeoutError, asyncio.CancelledError):
            pass  # what was measured is kept
        finally:
            telling.cancel()
    return timings


async def _tell(probe: Probe, tell: Callable[[str, float], None]) -> None:
    began_s = time.monotonic()
    while True:
        tell(probe.doing, time.monotonic() - began_s)
        await asyncio.sleep(1.0)
