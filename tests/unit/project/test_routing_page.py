"""Tests that docs/routing.md has every preset and term, with the weights of the code."""

from __future__ import annotations

import re
from pathlib import Path

from services.router.placement_config import read_selection
from services.router.policy import PRESETS
from services.router.policy.presets import DEFAULT
from services.router.policy.terms import TERMS, Term
from tests.support import ROOT

PAGE = (ROOT / "docs" / "routing.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """Returns the cells of the table under a heading, by the name in the first one."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    return {name: cells.split(" | ") for name, cells in lines}


def weights(cell: str) -> list[tuple[float, str]]:
    return [(float(weight), name) for weight, name in re.findall(r"([\d.]+) `(\w+)`", cell)]


def named(terms: tuple[tuple[float, Term], ...]) -> list[tuple[float, str]]:
    return [(weight, term.__name__) for weight, term in terms]


def test_the_weights_of_presets_are_those_of_the_code() -> None:
    table = rows("Which preset when")
    assert set(table) == set(PRESETS)
    for name, (_, of_prefill, of_decode) in table.items():
        prefill = weights(of_prefill)
        decode = prefill if of_decode == "the same" else weights(of_decode)
        assert prefill == named(PRESETS[name].prefill_terms), name
        in_place = [] if name == DEFAULT else [(8.0, "in_place")]
        assert in_place + decode == named(PRESETS[name].decode_terms), name
    assert "8 `in_place` in decode too" in PAGE


def test_every_term_is_explained() -> None:
    assert set(rows("Terms")) == set(TERMS)


def test_the_file_on_the_page_is_one_that_a_router_takes(tmp_path: Path) -> None:
    (content,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    path = tmp_path / "policies.toml"
    path.write_text(content)
    selection = read_selection([], [], str(path))
    assert [selection.of(name).name for name in ("org/chat", "code", "any")] == ["sticky", "token_aware", "token_aware"]
    assert (2.0, "free_memory") in named(selection.of("code").config.decode_terms)


def test_every_preset_was_measured() -> None:
    assert set(rows("Measured")) == set(PRESETS)
