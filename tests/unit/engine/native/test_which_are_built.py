"""Tests for which instruction sets the kernels are built; the compilers are fakes, so that nothing is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.core.errors import ConfigError
from services.engine.native import bindings, build, instruction_sets
from services.engine.native.instruction_sets import InstructionSet
from tests.unit.engine.native.test_instruction_sets import SANDY_BRIDGE, SKYLAKE, ZEN3, ZEN4

pytestmark = pytest.mark.skipif(
    len(instruction_sets.instruction_sets()) == 1, reason="this architecture has one instruction set"
)
ALL = ["avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"]
LIMITS = ("BATON_KERNELS", "BATON_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
Builds = Callable[..., list[str]]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    """Returns a function that builds on a processor with these flags, and names the libraries that are there."""
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    monkeypatch.setattr(InstructionSet, "shared_object", property(lambda each: libraries / f"kernels-{each.name}.so"))

    def built(flags: str, unknown: str = "no flag", **environment: str) -> list[str]:
        def compile(command: list[str], **_: object) -> SimpleNamespace:
            knows = unknown not in command
            if knows and "-o" in command:
                Path(command[command.index("-o") + 1]).touch()
            return SimpleNamespace(returncode=int(not knows), stdout="", stderr=f"unknown {unknown}")

        monkeypatch.setattr(build.subprocess, "run", compile)
        monkeypatch.setattr(instruction_sets, "cpu_flags", lambda cpuinfo: frozenset(flags.split()))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert build.main([]) == 0
        return [name for name in ALL if (libraries / f"kernels-{name}.so").exists()]

    return built


@pytest.mark.parametrize(
    ("flags", "best"), [(ZEN4, "avx512_bf16"), (SKYLAKE, "avx512"), (ZEN3, "avx2"), (SANDY_BRIDGE, "generic")]
)
def test_the_one_that_a_process_here_would_take(builds: Builds, flags: str, best: str) -> None:
    assert builds(flags) == [best]


@pytest.mark.parametrize("limit", ["BATON_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_a_plainer_one_where_processes_are_limited_to_it(builds: Builds, limit: str) -> None:
    assert builds(ZEN4, **{limit: "avx2"}) == ["avx2"]


def test_those_of_this_processor_for_whoever_tries_plainer_ones(builds: Builds) -> None:
    assert builds(SKYLAKE, BATON_KERNELS="processor", BATON_CPU_ISA="generic") == ["avx512", "avx2", "generic"]


def test_all_of_the_architecture_for_images(builds: Builds) -> None:
    assert builds(ZEN3, BATON_KERNELS="all") == ALL


def test_the_best_that_an_old_compiler_knows(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    assert builds(ZEN4, unknown="-mavx512bf16") == ["avx512_vnni"]
    said = capsys.readouterr()
    assert "no CPU kernels for avx512_bf16" in said.err
    assert "CPU kernels for avx512_vnni by" in said.out


def test_what_was_kept_is_copied_without_a_compiler(builds: Builds) -> None:
    """What zig built before is enough where it would have to be fetched again."""
    kept = build._zig({}).builds(instruction_sets.instruction_sets()[0], instruction_sets.sources_digest())
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert builds(ZEN4, CC="missing") == []
    assert build.main(["--fetch-compiler"]) == 0
    assert kept.read_bytes() == instruction_sets.instruction_sets()[0].shared_object.read_bytes()


def test_a_limit_that_makes_no_sense_is_one_line(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builds(ZEN4)
    monkeypatch.setenv("BATON_CPU_ISA", "avx3")
    assert build.main([]) == 2
    assert capsys.readouterr().err.startswith("BATON_CPU_ISA: 'avx3' is not one of avx512_bf16, ")
    with pytest.raises(ConfigError):
        bindings.usable()


def test_a_limited_process_without_its_kernels_says_how_to_build_them(
    builds: Builds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert builds(ZEN4) == ["avx512_bf16"]
    monkeypatch.setenv("BATON_CPU_ISA", "avx2")
    assert bindings.kernels.__wrapped__() is None
    (record,) = caplog.records
    assert "run BATON_CPU_ISA=avx2 python -m services.engine.native.build --fetch-compiler" in record.getMessage()
    assert builds(ZEN4, BATON_CPU_ISA="avx2") == ["avx512_bf16", "avx2"]
