"""Measures a cluster that does nothing else by sending requests to its router, and timing what comes back.

Owns: what is sent, and when. Never: what the timings mean (`services/sim/fitting.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from baton.v1 import inference_pb2, types_pb2
from baton_client import ONCE, AsyncClient
from services.rpc.options import channel_options
from services.sim.fitting import StepTimings
from services.sim.trace import NUM_TOKEN_IDS, random_tokens

_PROMPTS = (8, 32, 64, 128, 256, 512, 1024, 1536)
_BATCHES = (1, 2, 4, 8, 16)
_SHORT, _LONG = 48, 1024
_LONG_BATCH = 4
_GAPS = 24

Times = list[float]


class Probe:
    def __init__(self, client: AsyncClient, model: str, context_tokens: int, vocab_size: int, repeats: int) -> None:
        self._client = client
        self._model = model
        self._context_tokens = context_tokens
        self._repeats = repeats
        self._vocab_size = vocab_size
        self._num_asked = 0

    async def timings(self, *, beside: bool, tell: Callable[[str], None]) -> StepTimings:
        """Returns what was measured. `beside` says that the phases have workers of their own on one host: then each is
        measured while the other computes, too."""
        tell("prompts alone")
        for _ in range(2):
            await self._answer(64, 8)  # whatever happens only once has happened
        lengths = [size for size in _PROMPTS if size < self._context_tokens - 1]
        prefill_ms: dict[int, Times] = {size: [] for size in lengths}
        second_ms: dict[int, Times] = {}
        for _ in range(self._repeats):
            for size in lengths:
                times = await self._answer(size, 3 if size <= 512 else 1)
                prefill_ms[size].append(times[0] * 1e3)
                if len(times) > 1:
                    second_ms.setdefault(size, []).append((times[1] - times[0]) * 1e3)
        decode_ms: dict[tuple[int, int], Times] = {}
        for number, length in [*((number, _SHORT) for number in _BATCHES), (_LONG_BATCH, _LONG)]:
            if length + _GAPS * 3 >= self._context_tokens:
                continue
            tell(f"{number} streams of {length} tokens")
            for _ in range(self._repeats):
                gaps = await self._streams(number, length)
                decode_ms.setdefault((number, length + 2 * _GAPS), []).extend(gaps)
        both: dict[str, tuple[Times, Times]] = {}
        if beside:
            tell("prompts beside streams")
            both = await self._both(prefill_ms[min(512, max(lengths))], decode_ms[_LONG_BATCH, _SHORT + 2 * _GAPS])
        return StepTimings(prefill_ms, decode_ms, second_ms, both)

    async def _answer(self, num_prompt_tokens: int, num_output_tokens: int) -> Times:
        """Returns the seconds after which each token came."""
        self._num_asked += 1
        prompt = random_tokens(("probe", self._num_asked), num_prompt_tokens, min(NUM_TOKEN_IDS, self._vocab_size))
        request = inference_pb2.GenerateRequest(
            model=self._model,
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stopping=types_pb2.StoppingParams(max_tokens=num_output_tokens, ignore_eos=True),
        )
        times, began_s = Times(), time.perf_counter()
        async for event in self._client.generate_stream(request):
            if event.WhichOneof("event") == "chunk":
                times += [time.perf_counter() - began_s] * len(event.chunk.token_ids)
        return times

    async def _streams(self, number: int, length: int) -> Times:
        """Returns the gaps, in milliseconds, while as many streams run at once as were asked for."""
        return await self._gaps([(length, _GAPS + number * 8) for _ in range(number)])

    async def _gaps(self, asked: Sequence[tuple[int, int]]) -> Times:
        began_s = time.perf_counter()

        async def one(length: int, output: int) -> Times:
            shift_s = time.perf_counter() - began_s
            return [shift_s + at_s for at_s in await self._answer(length, output)]

        streams = await asyncio.gather(*(one(length, output) for length, output in asked))
        # The first gap of a stream holds its handoff.
        all_run_s, first_end_s = max(times[1] for times in streams), min(times[-1] for times in streams)
        return [
            (now - before) * 1e3
            for times in streams
            for before, now in itertools.pairwise(times)
            if before >= all_run_s and now <= first_end_s
        ]

    async def _both(self, prompt_ms: Times, gap_ms: Times) -> dict[str, tuple[Times, Times]]:
        """Measures prompts of 512 tokens, one after the other, beside streams."""
        size = min(512, self._context_tokens // 2)
        beside_ms, ended = Times(), asyncio.Event()

        async def prompts() -> None:
            await asyncio.sleep(0.3)
            while not ended.is_set():
                beside_ms.append((await self._answer(size, 1))[0] * 1e3)

        task = asyncio.create_task(prompts())
        output = max(_GAPS, min(200, self._context_tokens - _SHORT - 1))
        gaps = await self._gaps([(_SHORT, output)] * _LONG_BATCH)
        ended.set()
        await task
        return {"prefill": (prompt_ms, beside_ms[:-1]), "decode": (gap_ms, gaps[len(gaps) // 5 :])}


async def probe(
    target: str,
    model: str,
    context_tokens: int,
    vocab_size: int,
    *,
    beside: bool,
    repeats: int,
    tell: Callable[[str], None],
) -> StepTimings:
    """Measures the cluster behind a router's public port. Raises the client's errors."""
    async with AsyncClient(target, retry=ONCE, options=channel_options()) as client:
        return await Probe(client, model, context_tokens, vocab_size, repeats).timings(beside=beside, tell=tell)
