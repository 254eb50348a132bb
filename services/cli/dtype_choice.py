"""Decides what `--dtype auto` means on this machine: the type the model was saved in, or float32 where that is faster.

Owns: the choice, made once per host and model from a timing and kept in a file, so that workers on the same host never
choose differently: with different types they could not hand over to each other. Never: the timing itself, which a child
process makes (`services.engine.cpu.dtype_timing`); choices for accelerators, which compute in the saved type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata, util

from services.cli.child import Lifeline
from services.core.home import baton_home

logger = logging.getLogger(__name__)

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128
"""The request that a choice is made for: the medians of conversations (Splitwise, arXiv 2311.18677, §III)."""
MIN_SPEEDUP = 1.1
"""Float32 must be this many times as fast to be chosen, since it takes twice the memory."""
_VERSION = 2
"""The version of the way of timing. Increase it to make earlier choices void."""
_TIMING_LIMIT_S = 180.0
"""The time limit in seconds. A timing takes seconds, but more on a machine that is busy with other things."""
_FAILURE_KEPT_S = 3600.0
"""A failed timing means "as saved" for so long, for every process of this host: workers that are started one after the
other must not choose differently, nor each wait for a timing that this host is too slow for. Then it is tried again."""
_LOCK_LIMIT_S = _TIMING_LIMIT_S + 10.0
_LOOK_EVERY_S = 0.1
_SAVED_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""
_CHOOSABLE = ("bfloat16", "float16")
_VARIABLES = (
    "BATON_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Variables that keep torch and its libraries from using instructions that the CPU has."""
_CPU_FIELDS = ("model name", "flags", "CPU implementer", "CPU part", "Features")


@dataclasses.dataclass(frozen=True)
class Choice:
    dtype: str
    """The value for the flag --dtype: a type's name, or "auto", which the engine takes as "as saved"."""
    reason: str
    """The reason, for people, without a line break. Empty if there was nothing to choose."""


@dataclasses.dataclass(frozen=True)
class Timings:
    of: Mapping[str, tuple[float, float]]
    """For each type (milliseconds per prompt token, milliseconds per decode step), on one thread."""
    capability: str
    """The instruction sets that torch uses, in its words."""


Measure = Callable[[pathlib.Path, str], Timings]


class TimingFailed(Exception):
    """Reports that nothing could be timed. The message is the reason."""


def choose_dtype(
    dtype: str,
    device: str,
    model: pathlib.Path,
    *,
    measure: Measure | None = None,
    folder: pathlib.Path | None = None,
    tell: Callable[[str], None] = logger.info,
) -> Choice:
    """Returns the type for `--dtype dtype`.

    It takes seconds the first time on a machine, and never raises if the timing fails.

    `folder` is where choices are kept; by default `$BATON_HOME/dtype`. `tell` is given a line for people before a
    timing begins.
    """
    if dtype != "auto" or device.partition(":")[0] != "cpu":
        return Choice(dtype, "")
    saved = saved_dtype(model)
    if saved not in _CHOOSABLE:
        return Choice(dtype, "")
    measure = measure_in_child if measure is None else measure
    subject = _subject(model)
    digest = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
    entry = (folder or baton_home() / "dtype") / f"{model.name}-{digest[:16]}.json"
    if (kept := _read(entry, saved, logging.DEBUG)) is not None:
        return kept
    with _only_one(entry) as may_write:
        if (kept := _read(entry, saved, logging.WARNING)) is not None:  # another process chose meanwhile
            return kept
        tell(f"timing {saved} and float32 on this CPU, once for this model; --dtype {saved} spares it")
        failed_at_s = None
        try:
            choice = decide(saved, measure(model, saved))
        except TimingFailed as error:
            choice = Choice(saved, f"as saved, since nothing could be timed ({error})")
            failed_at_s = time.time()
        if may_write:
            _write(entry, choice, subject, failed_at_s)
        return choice


def decide(saved: str, timings: Timings) -> Choice:
    """Chooses float32 if it is clearly faster for the usual request, else the saved type."""
    whole_s = {name: (PROMPT_TOKENS * each[0] + OUTPUT_TOKENS * each[1]) / 1e3 for name, each in timings.of.items()}
    chosen = "float32" if whole_s["float32"] * MIN_SPEEDUP < whole_s[saved] else saved
    figures = ", ".join(
        f"{name} {each[0]:.3g} ms a prompt token, {each[1]:.3g} ms a decode, {whole_s[name]:.3g} s"
        for name, each in timings.of.items()
    )
    return Choice(
        chosen,
        f"{'as saved' if chosen == saved else f'faster here than {saved} as saved'}; one thread of this "
        f"{timings.capability} CPU, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out: {figures}",
    )


def saved_dtype(model: pathlib.Path) -> str:
    """Returns the type that config.json names, else that of the first weights; "" if neither is known."""
    try:
        config = json.loads((model / "config.json").read_text())
        for part in (config, config.get("text_config") or {}):
            if isinstance(name := part.get("dtype") or part.get("torch_dtype"), str):
                return name.removeprefix("torch.")
        for path in sorted(model.glob("*.safetensors")):
            with open(path, "rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in _SAVED_NAMES:
                    return _SAVED_NAMES[tensor["dtype"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.info("%s does not say in which type it was saved: %s", model, error)
    return ""


def measure_in_child(model: pathlib.Path, saved: str) -> Timings:
    """Times the model in a child process, which ends with this one. Raises TimingFailed."""
    lifeline = Lifeline()
    command = [sys.executable, "-m", "services.engine.cpu.dtype_timing", str(model), saved]
    try:
        child = subprocess.run(
            [*command, "--lifeline-fd", str(lifeline.read_fd)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=(lifeline.read_fd,),
            timeout=_TIMING_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        limit = f"it took longer than {_TIMING_LIMIT_S:g} s"
        raise TimingFailed(f"{limit}; --dtype float32 or {saved} spares it") from error
    except OSError as error:
        raise TimingFailed(str(error)) from error
    finally:
        lifeline.close()
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise TimingFailed(last[:300])
    try:
        found = json.loads(child.stdout.strip().splitlines()[-1])
        of = {name: (float(prefill), float(decode)) for name, (prefill, decode) in found["timings"].items()}
        return Timings({saved: of[saved], "float32": of["float32"]}, str(found["capability"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TimingFailed(f"the timing said {child.stdout[:200]!r}") from error


def _subject(model: pathlib.Path) -> dict[str, object]:
    """Returns all that a choice depends on: this CPU as torch may use it, torch, Baton's kernels, model shapes."""
    spec = util.find_spec("services")
    roots = [pathlib.Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    kernels = sorted(path for root in roots for path in (root / "engine" / "native").glob("kernels-*.so"))
    return {
        "cpu": _cpu(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "torch": metadata.version("torch"),
        "kernels": [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in kernels],
        "model": hashlib.sha256((model / "config.json").read_bytes()).hexdigest()[:16],
        "version": _VERSION,
    }


def _cpu(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns the name and the instruction sets of the first processor."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return {"machine": platform.machine(), "processor": platform.processor()}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields if name.strip() in _CPU_FIELDS}


def _read(entry: pathlib.Path, saved: str, level: int) -> Choice | None:
    """Returns the choice that was kept, or None if there is none or it is invalid, which is logged at `level`."""
    try:
        found = json.loads(entry.read_text())
        dtype, reason, failed_at_s = found["dtype"], found["reason"], found.get("failed_at_s")
        if failed_at_s is not None and not 0 <= time.time() - failed_at_s < _FAILURE_KEPT_S:
            return None
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        logger.log(level, "%s does not tell which type is faster here (%s): timing again", entry, error)
        return None
    if dtype not in (saved, "float32") or not isinstance(reason, str):
        logger.log(level, "%s names the type %r: timing again", entry, dtype)
        return None
    return Choice(dtype, f"{' '.join(reason.split())} (kept in {entry})")


@contextlib.contextmanager
def _only_one(entry: pathlib.Path) -> Iterator[bool]:
    """Waits until no other process chooses for the same entry. Yields whether the choice can be kept there."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = open(entry.with_suffix(".lock"), "w")  # noqa: SIM115 closed below
    except OSError as error:
        logger.warning("the choice for --dtype auto cannot be kept: %s", error)
        yield False
        return
    with lock:  # the lock is released with the descriptor, and so with the process
        give_up_s = time.monotonic() + _LOCK_LIMIT_S
        while not _locked(lock.fileno()):
            if time.monotonic() > give_up_s:
                logger.warning("another process chooses for %s and does not end: choosing beside it", entry)
                break
            time.sleep(_LOOK_EVERY_S)
        yield True


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.info("no lock around the choice for --dtype auto: %s", error)
    return True


def _write(entry: pathlib.Path, choice: Choice, subject: Mapping[str, object], failed_at_s: float | None) -> None:
    """Writes the choice whole or not at all, since readers take no lock. `failed_at_s`: seconds since 1970."""
    content: dict[str, object] = {"dtype": choice.dtype, "reason": choice.reason, "for": subject}
    if failed_at_s is not None:
        content["failed_at_s"] = failed_at_s
    partial = entry.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(entry)
    except OSError as error:
        logger.warning("the choice for --dtype auto cannot be kept: %s", error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
