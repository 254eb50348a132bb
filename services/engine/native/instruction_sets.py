"""Names the instruction sets for which the kernels are compiled, and chooses the one that this process uses.

Owns: the list, from the best to the plainest, with each one's compiler flags and what a processor needs for it. Each
has a library of its own; images and wheels hold all of them, so that they run well on any processor.
Never: compiles (`build`) or loads (`bindings`).

A process can be limited to a plainer one, to try on one machine what another would do: by the variable `BATON_CPU_ISA`,
which takes a name of the list, or by those by which torch and oneDNN are limited.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigError

VARIABLE = "BATON_CPU_ISA"
SOURCES_SYMBOL = "baton_sources"
"""The name under which a library has the `sources_digest` of what it was compiled from."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Describes one way to compile the kernels."""

    name: str
    compiler_flags: tuple[str, ...]
    needs: frozenset[str]
    """Flags that /proc/cpuinfo must list."""

    @property
    def shared_object(self) -> Path:
        """Returns the library that is compiled for it."""
        return Path(__file__).with_name(f"kernels-{self.name}.so")


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
"""What x86-64-v3 means (System V psABI for x86-64, 3.1.1); /proc/cpuinfo calls LZCNT "abm"."""
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_X86 = (
    InstructionSet("avx512_bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), _VNNI | {"avx512_bf16"}),
    InstructionSet("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _VNNI),
    InstructionSet("avx512", ("-march=x86-64-v4",), _AVX512),
    InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
)
_GENERIC = InstructionSet("generic", (), frozenset())
"""What every processor of this architecture has; on 64-bit Arm that includes NEON."""
_LIMITS_OF_ONEDNN = {
    "SSE41": "generic",
    "AVX": "generic",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512_vnni",
}
# The values by which torch and oneDNN, under its new and its old name, are limited, and what is then the best here.
_LIMITS_OF_OTHERS = {
    "ATEN_CPU_CAPABILITY": {"default": "generic", "avx2": "avx2"},
    "ONEDNN_MAX_CPU_ISA": _LIMITS_OF_ONEDNN,
    "DNNL_MAX_CPU_ISA": _LIMITS_OF_ONEDNN,
}


def instruction_sets(machine: str | None = None) -> tuple[InstructionSet, ...]:
    """Returns those of this architecture (or of `machine`, as `platform.machine` names it), the best first."""
    return (*(_X86 if (machine or platform.machine()) in ("x86_64", "AMD64") else ()), _GENERIC)


def sources_digest(folder: Path = Path(__file__).parent) -> str:
    """Returns 16 hex digits that stand for the C files in the folder: those beside this module, unless it is given."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.[ch]")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def usable(
    environment: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")
) -> tuple[InstructionSet, ...]:
    """Returns those that this process may use, the best first. Raises ConfigError if `BATON_CPU_ISA` names none."""
    known = instruction_sets()
    names = [each.name for each in known]
    first = 0
    for variable, meanings in ((VARIABLE, {name: name for name in names}), *_LIMITS_OF_OTHERS.items()):
        value = environment.get(variable, "")
        if variable == VARIABLE and value and value not in names:
            raise ConfigError(f"{VARIABLE}: {value[:50]!r} is not one of {', '.join(names)}")
        limit = meanings.get(value)
        if limit in names:
            first = max(first, names.index(limit))
    present = cpu_flags(cpuinfo)
    return tuple(each for each in known[first:] if each.needs <= present)


def without_kernels() -> str:
    """Returns what it means that no kernels were built or can be loaded, for whoever meets it."""
    best = usable()[0]
    limit = "" if best == usable({})[0] else f"{VARIABLE}={best.name} "
    return (
        "everything works, but steps on the CPU are slower, most of all in bfloat16, and --quantization gains nothing; "
        f"to have them, run {limit}python -m services.engine.native.build --fetch-compiler, or install gcc and run it "
        "without, and start the workers again"
    )


def has_amx(environment: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether oneDNN may multiply bfloat16 by the tiles of AMX."""
    limits = {environment.get(variable, "") for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")}
    return "amx_bf16" in cpu_flags(cpuinfo) and all("AMX" in limit for limit in limits - {"", "DEFAULT", "ALL"})


def multiplies_bfloat16(environment: Mapping[str, str] = os.environ, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether a model computes faster in bfloat16 than in float32: by the tiles of AMX, and by AVX-512's dot
    products on AMD's processors. On Intel's a prompt takes 1.8 times as long by these."""
    by_dot_products = usable(environment, cpuinfo)[0].name == "avx512_bf16"
    return by_dot_products and (has_amx(environment, cpuinfo) or _first(cpuinfo, "vendor_id") == "AuthenticAMD")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the flags of the first processor; none where the kernel does not list them."""
    return frozenset(_first(cpuinfo, "flags").split())


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns what the kernel calls the first processor; an empty string where it does not say."""
    return _first(cpuinfo, "model name")


def _first(cpuinfo: Path, field: str) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == field), "")
