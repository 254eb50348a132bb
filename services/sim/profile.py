"""Describes a worker by what its steps cost. Pure but for reading and writing files.

A step computes one token for each decoding sequence, and chunks of prompts. Its time has the form that Splitwise's
measurements and Baton's own cost model have (arXiv 2311.18677, section IV): a fixed part, a part for each prompt token
and each token that these attend to, and parts for each decoding sequence and for each token that these attend to. In a
step with both, the weights are read once, so that only the longer of the two fixed parts counts. Where a table has
measured steps of many sizes, its points take the place of the fixed parts and of those for each token and sequence.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.core.errors import ConfigError

Points = tuple[tuple[float, float], ...]
"""Measured (size, milliseconds), by size. Between two of them values are on a straight line, and so they are beyond the
first and the last, but for two things that no line of noisy points may say: what is larger than the last costs no less
than that, and what is smaller than the first costs no less for its size."""


@dataclass(frozen=True)
class WorkerProfile:
    """Keeps the figures of one kind of worker. Times are in milliseconds."""

    name: str
    ms_per_prefill_token: float
    ms_per_decode_step: float
    """A step with a single decoding sequence."""
    ms_per_decode_sequence: float
    """What each further sequence adds to it."""
    ms_per_prefill_step: float = 0.0
    ms_per_context_token: float = 0.0
    """What each token adds that a decoding sequence attends to."""
    ms_per_attended_token: float = 0.0
    """What each token adds that a prompt token attends to: a prompt of n tokens has n * n / 2 of these pairs."""
    ms_per_prompt: float = 0.0
    """What each prompt that a step has completed keeps its worker from the next: its lease, its handoff. A mixed worker
    keeps most of its prompts, and goes on at once."""
    ms_per_request: float = 0.0
    """What a request takes outside of the workers: to be read, tokenised, sent and written."""
    prefill_beside_factor: float = 1.0
    """How many times as long a step with prompts takes while another worker of the host computes."""
    decode_beside_factor: float = 1.0
    """The same of a step without prompts. With either above 1, all workers are on one host."""
    prefill_points: Points = ()
    """Over the prompt tokens of a step."""
    decode_points: Points = ()
    """Over its decoding sequences."""
    mixed_factor: float = 0.0
    """If not 0: a step with prompts and decodes takes this many times what one of as many prompt tokens takes, as in
    Splitwise's simulator."""
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
            if field.name.endswith("_points"):
                self._check_points(field.name, value)
                continue
            is_whole = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
                raise ConfigError(f"profile {self.name!r}: {field.name} is {value!r}, and must be a number")
            least = 1 if is_whole or field.name.endswith("_beside_factor") else 0
            if not least <= value <= 1e15 or (field.name in _POSITIVE and not value):
                raise ConfigError(f"profile {self.name!r}: {field.name} is {value}, which is out of range")

    def _check_points(self, name: str, points: Points) -> None:
        sizes = [size for size, _ in points]
        good = all(0 <= size <= 1e15 and 0 < ms <= 1e15 for size, ms in points) and len(points) != 1
        if not good or sizes != sorted(set(sizes)):
            raise ConfigError(f"profile {self.name!r}: {name} must be two points or more, by growing size")

    def points_instead_of(self, field: str) -> str:
        """Returns which points say what a figure would say without them; empty if none do."""
        for points, fields in _REPLACED.items():
            if field in fields and getattr(self, points):
                return points
        return ""

    def changed(self, settings: Iterable[str]) -> WorkerProfile:
        """Returns the profile with other figures, each given as FIELD=VALUE. Raises ConfigError."""
        types = {field.name: field.type for field in dataclasses.fields(self) if field.type in ("int", "float")}
        changes: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in types:
                raise ConfigError(f"{setting!r} names no field; there are {', '.join(types)}")
            if points := self.points_instead_of(name):
                raise ConfigError(
                    f"{setting!r}: the profile has measured steps of several sizes, and {points} of it say that; "
                    "--slow WORKER=X makes steps longer, another --profile all of them"
                )
            try:
                changes[name] = float(value)
            except ValueError as error:
                raise ConfigError(f"{setting!r}: {value!r} is no number") from error
            if types[name] == "int":
                if not changes[name].is_integer():
                    raise ConfigError(f"{setting!r}: must be a whole number")
                changes[name] = int(changes[name])
        return dataclasses.replace(self, **changes)

    def slowed(self, times: float) -> WorkerProfile:
        """Returns the profile of a worker whose steps take `times` times as long."""
        if times == 1.0:
            return self
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("ms_per_") and field.name != "ms_per_request":
                changes[field.name] = value * times
            elif field.name.endswith("_points"):
                changes[field.name] = tuple((size, ms * times) for size, ms in value)
        return dataclasses.replace(self, **changes)

    def prefill_ms(self, prompt_tokens: int, attended_tokens: float = 0.0) -> float:
        """Returns the milliseconds of a step that computes `prompt_tokens` and nothing else; `attended_tokens` is
        the sum of what each of them attends to."""
        if not prompt_tokens:
            return 0.0
        if self.prefill_points:
            return _at(self.prefill_points, prompt_tokens) + attended_tokens * self.ms_per_attended_token
        of_tokens_ms = prompt_tokens * self.ms_per_prefill_token + attended_tokens * self.ms_per_attended_token
        return self.ms_per_prefill_step + of_tokens_ms

    def decode_ms(self, num_decodes: int, context_tokens: float = 0.0) -> float:
        """Returns the milliseconds of a step that only decodes; `context_tokens` is the sum over its sequences."""
        if self.decode_points:
            return _at(self.decode_points, num_decodes) + context_tokens * self.ms_per_context_token
        more_ms = (num_decodes - 1) * self.ms_per_decode_sequence + context_tokens * self.ms_per_context_token
        return self.ms_per_decode_step + more_ms

    def step_s(
        self, prompt_tokens: int, num_decodes: int, context_tokens: float, attended_tokens: float = 0.0
    ) -> float:
        """Returns the seconds of a step."""
        if not num_decodes:
            return self.prefill_ms(prompt_tokens, attended_tokens) / 1e3
        decode_ms = self.decode_ms(num_decodes, context_tokens)
        if not prompt_tokens:
            return decode_ms / 1e3
        if self.mixed_factor:
            return self.mixed_factor * self.prefill_ms(prompt_tokens + num_decodes, attended_tokens) / 1e3
        fixed_ms = _at(self.decode_points, 1) if self.decode_points else self.ms_per_decode_step
        return (max(fixed_ms, self.prefill_ms(prompt_tokens, attended_tokens)) + decode_ms - fixed_ms) / 1e3

    @property
    def steps_grow(self) -> bool:
        """Returns whether no step of more tokens or sequences costs less than one of fewer: noisy points may fall."""
        return all(
            left_ms <= right_ms
            for points in (self.prefill_points, self.decode_points)
            for (_, left_ms), (_, right_ms) in pairwise(points)
        )

    @property
    def shares_host(self) -> bool:
        return self.prefill_beside_factor > 1 or self.decode_beside_factor > 1

    def decode_s(self, num_steps: int, num_decodes: int, context_tokens: float) -> float:
        """Returns the seconds of `num_steps` steps in a row that only decode, in each of which every context grows."""
        growth = num_decodes * num_steps * (num_steps - 1) / 2 * self.ms_per_context_token / 1e3
        return num_steps * self.decode_ms(num_decodes, context_tokens) / 1e3 + growth


def _at(points: Points, size: float) -> float:
    place = min(max(bisect_right(points, (size, math.inf)), 1), len(points) - 1)
    (left, left_ms), (right, right_ms) = points[place - 1], points[place]
    on_line_ms = left_ms + (right_ms - left_ms) * (size - left) / (right - left)
    if size > right:
        return max(on_line_ms, right_ms)
    if size < left:
        return max(on_line_ms, left_ms * size / left)
    return on_line_ms


_REPLACED = {
    "prefill_points": ("ms_per_prefill_token", "ms_per_prefill_step"),
    "decode_points": ("ms_per_decode_step", "ms_per_decode_sequence"),
}
_POSITIVE = {"ms_per_prefill_token", "ms_per_decode_step", "transfer_bytes_per_s"}


def read_profile(path: Path, name: str = "") -> WorkerProfile:
    """Returns the profile of a file: JSON as `write_profile` makes it, or a table like Splitwise's, of which `name` is
    MODEL:HARDWARE. Raises ConfigError with the reason."""
    try:
        if path.suffix == ".csv":
            with open(path, newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                return _from_table(path, [(reader.line_num, row) for row in reader], name)
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no profile, which `baton calibrate` writes: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no profile, which `baton calibrate` writes")
    return _of(path, content)


def write_profile(path: Path, profile: WorkerProfile) -> None:
    """Writes the profile. What stands at `path` is replaced once the new one is whole. Raises OSError with `path`."""
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        with beside.open("x") as file:  # which follows no link
            file.write(json.dumps(dataclasses.asdict(profile), indent=1, allow_nan=False) + "\n")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def _of(path: Path, content: Mapping[str, Any]) -> WorkerProfile:
    known = {field.name for field in dataclasses.fields(WorkerProfile)}
    if unknown := sorted(content.keys() - known):
        raise ConfigError(
            f"{path}: no profile has the field {', '.join(map(repr, unknown))}; `baton calibrate` writes one"
        )
    needed = [field.name for field in dataclasses.fields(WorkerProfile) if field.default is dataclasses.MISSING]
    if lacking := [name for name in needed if name not in content]:
        raise ConfigError(f"{path}: missing: {', '.join(lacking)}; `baton calibrate` writes a whole profile")
    try:
        points = {key: tuple((x, y) for x, y in value) for key, value in content.items() if key.endswith("_points")}
        return WorkerProfile(**{**content, **points})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _from_table(path: Path, lines: Sequence[tuple[int, Mapping[str, str | None]]], name: str) -> WorkerProfile:
    """Takes the measured points of one model on one kind of hardware and one number of GPUs: medians, by the tokens of
    a prompt or the sequences of a step. The other figures are fitted to them by least squares."""
    rows = [_measured(path, number, row) for number, row in lines]
    if not rows:
        raise ConfigError(f"{path}: has no measurements")
    kinds = sorted({row.kind for row in rows})
    kind, gpus = name, ""
    if name not in kinds:
        kind, _, gpus = name.rpartition(":")
    if kind not in kinds:
        raise ConfigError(f"{path}: has {', '.join(kinds)}; name one of them as FILE#MODEL:HARDWARE[:GPUS]")
    of_kind = [row for row in rows if row.kind == kind]
    numbers = sorted({row.gpus for row in of_kind}, key=lambda text: (len(text), text))
    if gpus and gpus not in numbers:
        raise ConfigError(f"{path}: {kind} was measured on {', '.join(numbers)} GPUs, not on {gpus}")
    chosen = [row for row in of_kind if row.gpus == (gpus or numbers[-1])]
    prefills = _medians((row.prompt_tokens * row.sequences, row.prompt_ms) for row in chosen)
    decodes = _medians((row.sequences, row.token_ms) for row in chosen)
    fixed_ms, token_ms = _line(prefills)
    step_ms, sequence_ms = _line((sequences - 1, ms) for sequences, ms in decodes)
    return WorkerProfile(
        name,
        ms_per_prefill_token=max(token_ms, 1e-6),
        ms_per_prefill_step=max(fixed_ms, 0.0),
        ms_per_decode_step=max(step_ms, 1e-6),
        ms_per_decode_sequence=max(sequence_ms, 0.0),
        prefill_points=prefills if len(prefills) > 1 else (),
        decode_points=decodes if len(decodes) > 1 else (),
    )


@dataclass(frozen=True)
class _Measured:
    """Keeps a line of a table."""

    kind: str
    gpus: str
    prompt_tokens: int
    """Tokens of each sequence's prompt."""
    sequences: int
    prompt_ms: float
    token_ms: float


def _measured(path: Path, number: int, row: Mapping[str, str | None]) -> _Measured:
    cells = {name: cell for name, cell in row.items() if cell is not None}  # a line that is cut off has fewer
    try:
        measured = _Measured(
            f"{cells['model']}:{cells['hardware']}",
            cells["tensor_parallel"] if "tensor_parallel" in row else "",
            int(cells["prompt_size"]),
            int(cells["batch_size"]),
            float(cells["prompt_time"]),
            float(cells["token_time"]),
        )
    except (KeyError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path}:{number}: {reason}") from error
    for value in (measured.prompt_tokens, measured.sequences, measured.prompt_ms, measured.token_ms):
        if not 0 < value <= 1e9:
            raise ConfigError(f"{path}:{number}: {value!s:.20} is out of range")
    return measured


def _medians(points: Iterable[tuple[float, float]]) -> Points:
    of_size: dict[float, list[float]] = {}
    for size, ms in points:
        of_size.setdefault(size, []).append(ms)
    return tuple((size, statistics.median(values)) for size, values in sorted(of_size.items()))


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns (a, b) of the line y = a + b x that is nearest to the points."""
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope
