"""The kernels use the best instruction set here, and a process can be limited to a plainer one."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.engine.native import bindings
from services.engine.native.bindings import Kernels
from services.engine.native.instruction_sets import (
    has_amx,
    instruction_sets,
    multiplies_bfloat16,
    sources_digest,
    usable,
)

ZEN4 = "fma movbe avx f16c abm bmi1 avx2 bmi2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_bf16 avx512_vnni"
SKYLAKE = "fma movbe avx f16c abm bmi1 avx2 bmi2 avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN3 = "fma movbe avx f16c abm bmi1 avx2 bmi2"
SANDY_BRIDGE = "avx"

pytestmark = pytest.mark.skipif(len(instruction_sets()) == 1, reason="this architecture has one instruction set")


def write(cpuinfo: Path, flags: str, vendor: str = "AuthenticAMD") -> Path:
    first = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\nbugs\t\t: x\n"
    cpuinfo.write_text(f"{first}\nprocessor\t: 1\nflags\t\t: none\n")
    return cpuinfo


def names(cpuinfo: Path, flags: str, **environment: str) -> list[str]:
    return [each.name for each in usable(environment, write(cpuinfo, flags))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (ZEN4, ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"]),
        (SKYLAKE, ["avx512", "avx2", "generic"]),
        (ZEN3, ["avx2", "generic"]),
        (SANDY_BRIDGE, ["generic"]),
    ],
)
def test_what_the_processor_lacks_is_left_out(tmp_path: Path, flags: str, expected: list[str]) -> None:
    assert names(tmp_path / "cpuinfo", flags) == expected


@pytest.mark.parametrize(
    ("flags", "vendor", "limit", "tiles", "expected"),
    [
        (f"{ZEN4} amx_bf16", "GenuineIntel", "", True, True),
        (f"{ZEN4} amx_bf16", "GenuineIntel", "AVX512_CORE_AMX", True, True),
        (f"{ZEN4} amx_bf16", "GenuineIntel", "AVX512_CORE_BF16", False, False),
        (f"{ZEN4} amx_bf16", "GenuineIntel", "AVX2", False, False),
        (ZEN4, "GenuineIntel", "", False, False),
        (ZEN4, "AuthenticAMD", "", False, True),
        (ZEN3, "AuthenticAMD", "", False, False),
    ],
)
def test_which_processors_multiply_bfloat16_fast(
    tmp_path: Path, flags: str, vendor: str, limit: str, tiles: bool, expected: bool
) -> None:
    cpuinfo = write(tmp_path / "cpuinfo", flags, vendor)
    environment = {"ONEDNN_MAX_CPU_ISA": limit}
    assert has_amx(environment, cpuinfo) == tiles
    assert multiplies_bfloat16(environment, cpuinfo) == expected


@pytest.mark.parametrize("hidden", ["fma", "movbe", "abm", "bmi1"])
def test_what_a_virtual_machine_hides_counts(tmp_path: Path, hidden: str) -> None:
    """Compilers use all of x86-64-v3, and a process would end at such an instruction."""
    assert names(tmp_path / "cpuinfo", ZEN4.replace(hidden, "")) == ["generic"]


@pytest.mark.parametrize(
    ("variable", "value", "best"),
    [
        ("BATON_CPU_ISA", "avx512", "avx512"),
        ("BATON_CPU_ISA", "generic", "generic"),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx2"),
        ("ATEN_CPU_CAPABILITY", "default", "generic"),
        ("ATEN_CPU_CAPABILITY", "avx512", "avx512_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512"),
        ("ONEDNN_MAX_CPU_ISA", "ALL", "avx512_bf16"),
        ("DNNL_MAX_CPU_ISA", "AVX2", "avx2"),
    ],
)
def test_a_process_can_be_limited(tmp_path: Path, variable: str, value: str, best: str) -> None:
    assert names(tmp_path / "cpuinfo", ZEN4, **{variable: value})[0] == best


def test_the_plainest_limit_counts_and_a_limit_adds_nothing(tmp_path: Path) -> None:
    limits = {"BATON_CPU_ISA": "avx512", "ATEN_CPU_CAPABILITY": "avx2"}
    assert names(tmp_path / "cpuinfo", ZEN4, **limits)[0] == "avx2"
    assert names(tmp_path / "cpuinfo", ZEN3, BATON_CPU_ISA="avx512_bf16")[0] == "avx2"


def test_an_unknown_name_is_refused_with_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BATON_CPU_ISA: 'avx3' is not one of avx512_bf16, "):
        names(tmp_path / "cpuinfo", ZEN4, BATON_CPU_ISA="avx3")


def test_a_machine_that_lists_nothing_has_the_plainest(tmp_path: Path) -> None:
    assert [each.name for each in usable({}, tmp_path / "missing")] == ["generic"]
    assert [each.name for each in instruction_sets("aarch64")] == ["generic"]


def test_a_library_of_other_sources_is_not_used(
    native: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an upgrade without a build, its kernels would read arguments as another struct has them."""
    monkeypatch.setattr(bindings, "sources_digest", lambda: "0123456789abcdef")
    assert bindings.kernels.__wrapped__() is None
    assert "was built from other sources than those that are here; build it again" in caplog.text


def test_what_sources_a_digest_stands_for(tmp_path: Path) -> None:
    (tmp_path / "one.c").write_text("int x;")
    first = sources_digest(tmp_path)
    (tmp_path / "kernels-avx2.so").touch()
    assert sources_digest(tmp_path) == first
    (tmp_path / "two.h").touch()
    second = sources_digest(tmp_path)
    (tmp_path / "one.c").write_text("int y;")
    assert len({first, second, sources_digest(tmp_path)}) == 3


def test_each_library_loads_where_the_processor_can(native: Kernels) -> None:
    assert bindings.kernels() is native
