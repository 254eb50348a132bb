"""Measures what constraints cost a step: 32 sequences held to a JSON schema against 32 free ones, and against half of
each; the engine alone, on this process's threads."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.engine import Load, running
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from services.engine.schedule.sequence import SamplingParams
from services.worker.grammar import Matcher, Vocabulary, compile_grammar, grammar_of

_SEQUENCES, _PROMPT_TOKENS, _STEPS = 32, 64, 48
_GREEDY, _SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=1)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_ENDLESS = {"type": "array", "minItems": 1000, "items": _PERSON}
"""Ends in no run, so that each has the same number of steps."""


def measure(model: Path, precision: Precision, threads: int, repeats: int) -> Findings:
    """Runs rounds of the three batches, greedy and sampled."""
    found: Findings = []
    with running(model, precision, threads) as load:
        info = load.engine.info
        vocabulary = Vocabulary(model, info.vocab_size, info.eos_token_ids)
        compiled = compile_grammar(vocabulary, grammar_of("json_schema", json.dumps(_ENDLESS)))
        load.run(4, 64, 8)
        for name, sampling in (("greedy", _GREEDY), ("sampled", _SAMPLED)):
            rounds = [[_run(load, compiled, count, sampling) for count in (0, 16, 32)] for _ in range(repeats)]
            free, half, whole = zip(*rounds, strict=True)
            found += _figures(name, list(free), list(half), list(whole))
    return found


class _Batch:
    """Keeps milliseconds of a decode step: of the whole, of the wait for masks, and of sampling."""

    def __init__(self, step_ms: float, masks_ms: float, sample_ms: float) -> None:
        self.step_ms = step_ms
        self.masks_ms = masks_ms
        self.sample_ms = sample_ms


def _run(load: Load, compiled: Matcher, num_constrained: int, sampling: SamplingParams) -> _Batch:
    tally = load.engine.tally
    before, num_steps = dict(tally.part_seconds), tally.num_steps
    load.run(_SEQUENCES, _PROMPT_TOKENS, 1 + _STEPS, sampling, [compiled.copy() for _ in range(num_constrained)])
    num_steps = tally.num_steps - num_steps
    masks, sample = ((tally.part_seconds[part] - before[part]) * 1e3 / num_steps for part in ("masks", "sample"))
    return _Batch(statistics.median(load.decode_steps_ms[_SEQUENCES]), masks, sample)


def _figures(name: str, free: list[_Batch], half: list[_Batch], whole: list[_Batch]) -> Findings:
    found: Findings = [
        Figure(f"constraints, {name}: step of 32 free sequences", "ms", tuple(each.step_ms for each in free)),
        Figure("  of 32 constrained ones", "ms", tuple(each.step_ms for each in whole)),
        Figure("  of 16 and 16", "ms", tuple(each.step_ms for each in half)),
        ratio("  32 constrained over 32 free", [each.step_ms for each in whole], [each.step_ms for each in free]),
        Figure("  wait for masks, of a step of 32", "ms", tuple(each.masks_ms for each in whole)),
        Figure(
            "  sampling more than without, of a step of 32",
            "ms",
            tuple(each.sample_ms - beside.sample_ms for each, beside in zip(whole, free, strict=True)),
        ),
    ]
    shares = [
        100 * (each.masks_ms + each.sample_ms - beside.sample_ms) / each.step_ms
        for each, beside in zip(whole, free, strict=True)
    ]
    return [*found, Figure("  both, share of the step", "%", tuple(shares), "at most 5")]
