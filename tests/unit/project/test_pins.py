"""Tests that images install what was tried: every package that Baton names is pinned."""

from __future__ import annotations

import re
import tomllib

from tests.support import ROOT


def test_what_is_installed_is_pinned() -> None:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    needed: list[str] = []
    for path in ("pyproject.toml", "client/pyproject.toml"):
        file = tomllib.loads((ROOT / path).read_text())
        needed += [*file["project"]["dependencies"], *file["build-system"]["requires"]]
        for extra in ("worker", "worker-vllm", "redis", "s3"):
            needed += file["project"].get("optional-dependencies", {}).get(extra, [])
    names = {re.split(r"[\[<>=~ ]", line)[0].lower().replace("_", "-") for line in needed}
    assert names - pinned == {"baton-client"}
