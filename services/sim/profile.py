"""Describes a worker by what its steps cost. Pure but for reading and writing files.

A step computes one token for each decoding sequence, and chunks of prompts. Its time has the form that Splitwise's
measurements and Baton's own cost model have (arXiv 2311.18677, section IV): a fixed part, a part for each prompt token,
and parts for each decoding sequence and for each token that these attend to. In a step with both, the weights are read
once, so that only the longer of the two fixed parts counts.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.errors import ConfigError


@dataclass(frozen=True)
class WorkerProfile:
    """Keeps the figures of one kind of worker. Times are in milliseconds."""

    name: str
    ms_per_prefill_token: float
    ms_per_decode_step: float
    """Of a step with a single decoding sequence."""
    ms_per_decode_sequence: float
    """What each further sequence adds to it."""
    ms_per_prefill_step: float = 0.0
    ms_per_context_token: float = 0.0
    """What each token adds that a decoding sequence attends to."""
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 32768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_bytes_per_token: int = 23040
    transfer_bytes_per_s: float = 1e9
    transfer_latency_ms: float = 1.0
    cost_per_hour: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                continue
            is_whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
                raise ConfigError(f"profile {self.name!r}: {field.name} is {value!r}, and must be a number")
            least = 1 if is_whole else 0
            if not least <= value <= 1e15 or (field.name in _POSITIVE and not value):
                raise ConfigError(f"profile {self.name!r}: {field.name} is {value}, which is out of range")

    def slowed(self, times: float) -> WorkerProfile:
        """Returns the profile of a worker whose steps take so many times as long."""
        if times == 1.0:
            return self
        names = [field.name for field in dataclasses.fields(self) if field.name.startswith("ms_per_")]
        return dataclasses.replace(self, **{name: getattr(self, name) * times for name in names})

    def step_s(self, prompt_tokens: int, num_decodes: int, context_tokens: float) -> float:
        """Returns the seconds of a step; `context_tokens` is the sum over its decoding sequences."""
        prefill_ms = self.ms_per_prefill_step + prompt_tokens * self.ms_per_prefill_token if prompt_tokens else 0.0
        if not num_decodes:
            return prefill_ms / 1e3
        more_ms = (num_decodes - 1) * self.ms_per_decode_sequence + context_tokens * self.ms_per_context_token
        return (max(self.ms_per_decode_step, prefill_ms) + more_ms) / 1e3

    def decode_s(self, num_steps: int, num_decodes: int, context_tokens: float) -> float:
        """Returns the seconds of so many steps in a row that only decode, in each of which every context grows."""
        growth = num_decodes * num_steps * (num_steps - 1) / 2 * self.ms_per_context_token / 1e3
        return num_steps * self.step_s(0, num_decodes, context_tokens) + growth


_POSITIVE = {"ms_per_prefill_token", "ms_per_decode_step", "transfer_bytes_per_s"}


def read_profile(path: Path, name: str = "") -> WorkerProfile:
    """Returns the profile of a file: JSON as `write_profile` makes it, or a table like Splitwise's, of which `name` is
    MODEL:HARDWARE. Raises ConfigError with the reason."""
    try:
        if path.suffix == ".csv":
            with open(path, newline="") as file:
                return _from_table(path, list(csv.DictReader(file)), name)
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no profile, which `baton calibrate` writes: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no profile, which `baton calibrate` writes")
    return _of(path, content)


def write_profile(path: Path, profile: WorkerProfile) -> None:
    """Writes the profile. What stands at `path` is replaced once the new one is whole. Raises OSError with `path`."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(json.dumps(dataclasses.asdict(profile), indent=1) + "\n")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _of(path: Path, content: Mapping[str, Any]) -> WorkerProfile:
    known = {field.name for field in dataclasses.fields(WorkerProfile)}
    if unknown := sorted(content.keys() - known):
        raise ConfigError(f"{path}: {', '.join(unknown)} is not known")
    try:
        return WorkerProfile(**content)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_table(path: Path, rows: Sequence[Mapping[str, str]], name: str) -> WorkerProfile:
    """Fits the parts of a step to the measured points of one model on one kind of hardware, by least squares."""
    kinds = sorted({f"{row.get('model')}:{row.get('hardware')}" for row in rows})
    if name not in kinds:
        raise ConfigError(f"{path}: has {', '.join(kinds)}; name one of them as FILE#MODEL:HARDWARE")
    of_kind = [row for row in rows if f"{row['model']}:{row['hardware']}" == name]
    try:
        points = [
            tuple(float(row[column]) for column in ("prompt_size", "batch_size", "prompt_time", "token_time"))
            for row in of_kind
        ]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    fixed_ms, token_ms = _line((prompt * batch, prompt_ms) for prompt, batch, prompt_ms, _ in points)
    step_ms, sequence_ms = _line((batch - 1, step) for _, batch, _, step in points)
    return WorkerProfile(
        name,
        ms_per_prefill_token=max(token_ms, 1e-6),
        ms_per_prefill_step=max(fixed_ms, 0.0),
        ms_per_decode_step=max(step_ms, 1e-6),
        ms_per_decode_sequence=max(sequence_ms, 0.0),
    )


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns (a, b) of the line y = a + b x that is nearest to the points."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope
