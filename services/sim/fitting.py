"""Computes a profile from how long requests took on a cluster that did nothing else. Pure.

What is known beside it (pool, model, limits) comes from the workers' own descriptions.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.core.errors import BatonError
from services.sim.profile import Points, WorkerProfile

_LEAST_MS = 1e-3


@dataclass(frozen=True)
class StepTimings:
    """Holds measurements, each a few times repeated, in milliseconds."""

    prefill_ms: dict[int, list[float]]
    """Times in which workers computed prompts alone, by their tokens. Some are short, some longer than a step's
    tokens."""
    decode_ms: dict[tuple[int, int], list[float]]
    """Gaps between tokens, by (sequences in the step, tokens of each). At least two numbers of sequences, and one of
    them with two lengths."""
    around_ms: list[float] = field(default_factory=list)
    """What the times to first token of prompts alone were beyond those in which they were computed."""
    second_ms: dict[int, list[float]] = field(default_factory=dict)
    """Gaps between the first token and the second, of requests alone, by the tokens of their prompts."""
    saturated_ms: dict[int, list[float]] = field(default_factory=dict)
    """Times from one prompt's first token to the next one's while another always waits and each is handed over to
    another worker, by the tokens of each. If the phases have workers of their own on one host, decode workers are busy
    meanwhile."""
    beside_ms: list[float] = field(default_factory=list)
    """Gaps between tokens of `beside_streams` meanwhile."""
    beside_streams: int = 0


def fitted(known: WorkerProfile, timings: StepTimings) -> WorkerProfile:
    """Returns the profile of the measured cluster's workers; `known` has everything that is not measured here.

    Raises BatonError if there are too few measurements.
    """
    # Means, as the time per output token of a request is one of its gaps: a few long ones count.
    gaps = {key: statistics.fmean(values) for key, values in timings.decode_ms.items() if values}
    firsts = {size: statistics.median(values) for size, values in timings.prefill_ms.items() if values}
    if len({sequences for sequences, _ in gaps}) < 2 or len(firsts) < 2:
        raise BatonError("too few answers came to measure what steps cost")
    context_ms = _context_ms(gaps)
    decode_points = _growing(
        (sequences, ms - context_ms * sequences * tokens) for (sequences, tokens), ms in sorted(_shortest(gaps).items())
    )
    attended_ms = _attended_ms(firsts, known.max_num_batched_tokens)
    prefill_points = _growing(
        (size, ms - attended_ms * size * size / 2)
        for size, ms in sorted(firsts.items())
        if size <= known.max_num_batched_tokens
    )
    (first, first_ms), (last, last_ms) = prefill_points[0], prefill_points[-1]
    (few, few_ms), (many, many_ms) = decode_points[0], decode_points[-1]
    measured = dataclasses.replace(
        known,
        ms_per_prefill_token=max(_LEAST_MS, (last_ms - first_ms) / (last - first)),
        ms_per_decode_step=few_ms,
        ms_per_decode_sequence=max(0.0, (many_ms - few_ms) / (many - few)),
        ms_per_context_token=context_ms,
        ms_per_attended_token=attended_ms,
        ms_per_request=statistics.median(timings.around_ms) if timings.around_ms else 0.0,
        prefill_points=prefill_points,
        decode_points=decode_points,
        transfer_latency_ms=_latency_ms(timings.second_ms, gaps) if timings.second_ms else known.transfer_latency_ms,
    )
    return _beside(measured, timings)


def _beside(profile: WorkerProfile, timings: StepTimings) -> WorkerProfile:
    """Adds what a prompt costs its worker after its step, and how much slower workers of one host are together."""
    times = [
        (profile.prefill_ms(size, size * size / 2), statistics.median(values))
        for size, values in sorted(timings.saturated_ms.items())
    ]
    if not times:
        return profile
    factor = 1.0
    if timings.beside_ms and len(times) > 1:
        (short, short_ms), (long, long_ms) = times[0], times[-1]
        factor = max(1.0, (long_ms - short_ms) / (long - short))
    return dataclasses.replace(
        profile,
        ms_per_prompt=max(0.0, statistics.median(ms - factor * alone for alone, ms in times)),
        prefill_beside_factor=factor,
        decode_beside_factor=(
            max(1.0, statistics.fmean(timings.beside_ms) / profile.decode_ms(timings.beside_streams))
            if timings.beside_ms
            else 1.0
        ),
    )


def _context_ms(gaps: Mapping[tuple[int, int], float]) -> float:
    """Returns the milliseconds that a token of context adds, by the steps that differ in it alone."""
    slopes = []
    for sequences in {sequences for sequences, _ in gaps}:
        of_length = sorted((tokens, ms) for (number, tokens), ms in gaps.items() if number == sequences)
        (short, short_ms), (long, long_ms) = of_length[0], of_length[-1]
        if long > short:
            slopes.append((long_ms - short_ms) / (long - short) / sequences)
    return max(0.0, statistics.median(slopes)) if slopes else 0.0


def _shortest(gaps: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Returns the steps over the shortest contexts, of each number of sequences."""
    least: dict[int, int] = {}
    for sequences, tokens in gaps:
        least[sequences] = min(tokens, least.get(sequences, tokens))
    return {(sequences, tokens): gaps[sequences, tokens] for sequences, tokens in least.items()}


def _attended_ms(firsts: Mapping[int, float], chunk: int) -> float:
    """Returns the milliseconds for each token that a prompt token attends to, by what the longest prompt took beyond
    as many chunks of a shorter one."""
    longest, whole = max(firsts), max((size for size in firsts if size <= chunk), default=0)
    if longest <= whole or not whole:
        return 0.0
    more_ms = firsts[longest] - longest / whole * firsts[whole]
    return max(0.0, more_ms / ((longest * longest - longest * whole) / 2))


def _growing(points: Iterable[tuple[float, float]]) -> Points:
    """Returns the points without noise that would make a step of more cost less. Noise only ever adds to a time, so the
    longer one of such two is the one that is wrong."""
    kept: list[tuple[float, float]] = []
    for size, ms in reversed(list(points)):
        kept.append((size, max(_LEAST_MS, min(ms, kept[-1][1]) if kept else ms)))
    return tuple(reversed(kept))


def _latency_ms(second_ms: Mapping[int, list[float]], gaps: Mapping[tuple[int, int], float]) -> float:
    step_ms = min(ms for (sequences, _), ms in gaps.items() if sequences == 1)
    shortest = statistics.median(second_ms[min(second_ms)])
    return max(0.0, shortest - step_ms)
