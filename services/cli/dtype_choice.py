"""Decides what `--dtype auto` and `--quantization auto` mean on this machine: the type the model was saved in, or
float32 where that is faster; and the weights of a GGUF file, or of a GPTQ or AWQ checkpoint, as they are there, where
that is faster still.

Owns: the choice, made once per host and model from a timing and kept in a file, so that workers on the same host never
choose differently: with different types they could not hand over to each other. Never: the timing itself, which a child
process makes (`services.engine.cpu.dtype_timing`); choices for accelerators, which compute in the saved type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.cli.child import Lifeline
from services.core.config import KEPT_BLOCKS_FILE, KEPT_WEIGHTS
from services.core.errors import ConfigError
from services.core.home import baton_home
from services.core.printable import printable
from services.engine.cpu import kept_timings
from services.engine.native import instruction_sets

logger = logging.getLogger(__name__)

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 128
"""The request that a choice is made for: the medians of conversations (Splitwise, arXiv 2311.18677, §III)."""
MIN_SPEEDUP = 1.1
"""Float32 must be this many times as fast to be chosen, since it takes twice the memory; and so must weights of few
bits, since inputs are rounded to 8 bits for them."""
_MAX_REASON = 1000
"""Characters of a reason that are shown: the file may hold anything."""
_VERSION = 6
"""The version of the way of timing. Increase it to make earlier choices void."""
_TIMING_LIMIT_S = 180.0
"""The time limit in seconds. A timing takes seconds, but more on a machine that is busy with other things."""
_FAILURE_KEPT_S = 3600.0
"""A failed timing means "as saved" for so long, for every process of this host: workers that are started one after the
other must not choose differently, nor each wait for a timing that this host is too slow for. Then it is tried again."""
_LOCK_LIMIT_S = _TIMING_LIMIT_S + 10.0
_SAVED_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""
_CHOOSABLE = ("bfloat16", "float16")
_IN_WORDS = {
    "gguf": "the GGUF file's weights",
    "gptq": "the GPTQ weights",
    "awq": "the AWQ weights",
    "int8": "weights in 8 bits",
    "int4": "weights in 4 bits",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    dtype: str
    """The value for the flag --dtype: a type's name, or "auto", which the engine takes as "as saved"."""
    reason: str
    """The reason, for people, without a line break. Empty if there was nothing to choose."""
    quantization: str = "none"
    """The value for the flag --quantization, but never "auto"."""


@dataclasses.dataclass(frozen=True)
class Timings:
    of: Mapping[str, tuple[float, float]]
    """For each way (milliseconds per prompt token, milliseconds per decode step), on one thread. A way is the name of a
    type, or "TYPE+BITS" over weights in fewer bits, as `--quantization BITS` has them."""
    capability: str
    """The instruction sets that torch uses, in its words."""


Measure = Callable[[pathlib.Path, str, Sequence[str], str], Timings]
"""Times a model in these ways; the second argument is the type it was saved in, the last one that of its KV cache."""


class TimingFailed(Exception):
    """Reports that nothing could be timed. The message is the reason."""


def choose_dtype(
    dtype: str,
    device: str,
    model: pathlib.Path,
    quantization: str = "auto",
    *,
    kv_dtype: str = "auto",
    measure: Measure | None = None,
    folder: pathlib.Path | None = None,
    tell: Callable[[str], None] = logger.info,
) -> Choice:
    """Returns the type and the bits of weights for `--dtype dtype --quantization quantization`.

    With an explicit type, "auto" bits are those that the model was saved in. With none, this takes seconds the first
    time on a machine; it never raises if the timing fails. Raises ConfigError if weights are to be kept that the model
    does not have, or on an accelerator, or if `BATON_CPU_ISA` makes no sense: a timing, and a worker that loads, would
    say so only after a minute.

    `kv_dtype`, the value of `--kv-dtype`, is what the ways are timed with, since attention may compute another way over
    it; it is not chosen here. `folder` is where choices are kept; by default `$BATON_HOME/dtype`. `tell` is given a
    line for people before a timing begins.
    """
    explicit = "none" if quantization == "auto" else quantization
    _demand_quantization(explicit, device, model)
    instruction_sets.usable()
    if dtype != "auto" or device.partition(":")[0] != "cpu":
        return Choice(dtype, "", explicit)
    saved = saved_dtype(model)
    if saved not in _CHOOSABLE:
        return Choice(dtype, "", explicit)
    ways = tuple(_name(name, "" if explicit == "none" else explicit) for name in (saved, "float32"))
    if quantization == "auto" and (kept := kept_weights(model)):
        ways += tuple(_name(name, kept) for name in (saved, "float32"))
    bits = ways[-1].partition("+")[2]
    spared_by = f"--dtype {saved}" + (f" --quantization {bits}" if bits else "")
    measure = measure_in_child if measure is None else measure
    subject = {
        **kept_timings.host(),
        "model": _digest(model / "config.json"),
        "ways": ways,
        "kv_dtype": kv_dtype,
        "version": _VERSION,
    }
    entry = (folder or baton_home() / "dtype") / f"{model.name}-{kept_timings.digest_of(subject)}.json"
    timed = False

    def find() -> dict[str, object]:
        nonlocal timed
        timed = True
        tell(f"timing {' and '.join(ways)} on this CPU, once for this model; {spared_by} spares it")
        try:
            choice = decide(saved, measure(model, saved, ways, kv_dtype))
        except TimingFailed as error:
            reason = f"as saved, since nothing could be timed ({error})"
            choice = Choice(saved, reason)
            return {**_content(choice), "for": subject, "failed_at_s": time.time()}
        return {**_content(choice), "for": subject}

    choice = kept_timings.once_per_host(
        entry,
        lambda content: _choice(content, saved, ways),
        find,
        limit_s=_LOCK_LIMIT_S,
        what="the choice for --dtype auto",
    )
    if explicit != "none":
        choice = dataclasses.replace(choice, quantization=explicit)
    return choice if timed else dataclasses.replace(choice, reason=f"{choice.reason} (kept in {entry})")


def _demand_quantization(quantization: str, device: str, model: pathlib.Path) -> None:
    if quantization == "none":
        return
    if device.partition(":")[0] != "cpu":
        raise ConfigError(
            f"--quantization: {quantization} works only on a CPU; give none or auto for --device {device}"
        )
    has = kept_weights(model)
    if quantization in KEPT_WEIGHTS and quantization != has:
        others = f"auto, none, {has}, int8 or int4" if has else "auto, none, int8 or int4"
        raise ConfigError(f"--quantization: {model} has no {quantization} weights; give {others}")


def decide(saved: str, timings: Timings) -> Choice:
    """Chooses float32 if it is clearly faster for the usual request, else the saved type; and the quantised weights as
    they are if they were timed, and are clearly faster still."""
    whole_s = {name: (PROMPT_TOKENS * each[0] + OUTPUT_TOKENS * each[1]) / 1e3 for name, each in timings.of.items()}

    def better(weights: str) -> str:
        whole, half = _name("float32", weights), _name(saved, weights)
        return whole if whole_s[whole] * MIN_SPEEDUP < whole_s[half] else half

    kept = next((name.partition("+")[2] for name in whole_s if "+" in name), "")
    packed = better(kept) if kept else None
    plain = better("") if saved in whole_s else None
    if packed is None or (plain is not None and whole_s[packed] * MIN_SPEEDUP >= whole_s[plain]):
        packed = None
    chosen = packed or plain
    assert chosen is not None, "something was timed"
    dtype = chosen.partition("+")[0]
    how = "as saved" if chosen == saved else f"faster here than {saved} as saved"
    if packed is not None:
        how = f"over {_IN_WORDS[kept]}" + (f", faster here than {plain}" if plain else "")
    figures = ", ".join(
        f"{name} {each[0]:.3g} ms a prompt token, {each[1]:.3g} ms a decode, {whole_s[name]:.3g} s"
        for name, each in timings.of.items()
    )
    return Choice(
        dtype,
        f"{how}; one thread of this {timings.capability} CPU, {PROMPT_TOKENS} tokens in and {OUTPUT_TOKENS} out: "
        f"{figures}",
        kept if packed else "none",
    )


def _name(dtype: str, weights: str) -> str:
    return f"{dtype}+{weights}" if weights else dtype


def kept_weights(model: pathlib.Path) -> str:
    """Returns which of `KEPT_WEIGHTS` the model has, or ""."""
    if (model / KEPT_BLOCKS_FILE).is_file():
        return "gguf"
    try:
        fields = json.loads((model / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # the engine says what is wrong
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    return method if method in ("gptq", "awq") else ""


def saved_dtype(model: pathlib.Path) -> str:
    """Returns the type that config.json names, else that of the first weights; "" if neither is known."""
    try:
        config = json.loads((model / "config.json").read_text())
        for part in (config, config.get("text_config") or {}):
            if isinstance(name := part.get("dtype") or part.get("torch_dtype"), str):
                return name.removeprefix("torch.")
        for path in sorted(each for each in model.glob("*.safetensors") if each.is_file()):
            with open(path, "rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in _SAVED_NAMES:
                    return _SAVED_NAMES[tensor["dtype"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.info("%s does not say in which type it was saved: %s", model, error)
    return ""


def measure_in_child(model: pathlib.Path, saved: str, ways: Sequence[str], kv_dtype: str = "auto") -> Timings:
    """Times the model in a child process, which ends with this one. Raises TimingFailed."""
    lifeline = Lifeline()
    command = [sys.executable, "-m", "services.engine.cpu.dtype_timing", str(model), saved, *ways]
    command += ["--kv-dtype", kv_dtype]
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
        if not of.keys() <= set(ways):
            raise ValueError("ways that were not asked for")
        return Timings(of, str(found["capability"]))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TimingFailed(f"the timing said {child.stdout[:200]!r}") from error


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _content(choice: Choice) -> dict[str, object]:
    """Returns the choice as it is kept in a file."""
    return {"dtype": choice.dtype, "quantization": choice.quantization, "reason": choice.reason}


def _choice(content: Any, saved: str, ways: Sequence[str]) -> Choice | None:
    """Returns the choice that was kept, or None if it is time to try again. Raises ValueError, KeyError or TypeError if
    it makes no sense."""
    dtype, quantization, reason = content["dtype"], content["quantization"], content["reason"]
    failed_at_s = content.get("failed_at_s")
    if failed_at_s is not None and abs(time.time() - failed_at_s) >= _FAILURE_KEPT_S:
        return None
    way = _name(dtype, "" if quantization == "none" else quantization)
    if way not in (saved, *ways) or not isinstance(reason, str):
        raise ValueError("it names a way that was not asked for")
    return Choice(dtype, printable(" ".join(reason.split()))[:_MAX_REASON], quantization)
