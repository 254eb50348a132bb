"""Tests `baton keys`: a key that it makes opens by what it adds to a tenants file, and nothing else of that changes."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
from pathlib import Path

import pytest

from services.cli.main import main
from services.router.tenants.keys import KeyRing, new_key
from services.router.tenants.tenant import Tenant
from services.router.tenants.tenants_file import read_tenants


def run(*argv: str) -> int:
    return main(["keys", *argv])


def tenants_in(file: Path) -> dict[str, Tenant]:
    return read_tenants(file.read_bytes(), file.name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def test_a_new_key_opens_by_what_the_file_keeps_of_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "acme", "--tenants", str(file), "--expires", "2027-01-31") == 0
    printed = capsys.readouterr()
    key = printed.out.removesuffix("\n")
    tenants = tenants_in(file)
    assert KeyRing(tenants.values()).tenant_of(f"Bearer {key}", 0.0) is tenants["acme"]
    assert tenants["acme"].keys[0].expires_unix_s == 1_801_353_600
    assert key[-43:] not in file.read_text() + printed.err
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_file_of_the_environment_is_taken(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_TENANTS", str(file))
    assert run("new", "acme") == 0
    assert str(file) in capsys.readouterr().err
    assert set(tenants_in(file)) == {"acme"}


BEFORE = f"""\
# Who may use the router.
tenants:
  shop:   # a product
    keys:
      - id: aaaa
        sha256: {"0" * 64}   # of spring
    limits: {{tokens_per_min: 1000}}

  # Nobody gets in as this one yet.
  search:
    models:
    - "a model"
    - another
    weight: 2
# The end.
"""


@pytest.mark.parametrize("name", ["shop", "search", "new"])
def test_a_key_is_added_and_every_other_line_stays(file: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(BEFORE)
    file.chmod(0o640)
    before = tenants_in(file)
    assert run("new", name, "--tenants", str(file)) == 0
    key = capsys.readouterr().out.strip()
    tenants = tenants_in(file)
    assert KeyRing(tenants.values()).tenant_of(f"Bearer {key}", 0.0).name == name
    assert {each: tenants[each] for each in before if each != name} == {
        each: before[each] for each in before if each != name
    }
    changes = list(difflib.ndiff(BEFORE.splitlines(), file.read_text().splitlines()))
    assert not [line for line in changes if line.startswith("-")]
    assert file.stat().st_mode & 0o777 == 0o640
    if name == "shop":
        assert tenants[name].keys[0] == before[name].keys[0], "the old one opens until it is taken out"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_the_file_stays_its_owners(file: Path) -> None:
    """Else a router of that user could not read it any more."""
    file.write_text(BEFORE)
    os.chown(file, 4711, 4712)
    assert run("new", "shop", "--tenants", str(file)) == 0
    assert (file.stat().st_uid, file.stat().st_gid) == (4711, 4712)


@pytest.mark.parametrize(
    "text",
    [
        "tenants: {acme: {weight: 2}}\n",
        f"tenants:\n  acme:\n    keys: [{{id: aaaa, sha256: {'0' * 64}}}]\n",
        "tenants:\n  a: &same\n    weight: 2\n  acme: *same\n",
    ],
    ids=["in braces", "a list in brackets", "an alias"],
)
def test_a_file_that_it_cannot_add_to_stays_as_it_is(file: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert run("new", "acme", "--tenants", str(file)) == 2
    printed = capsys.readouterr()
    assert not re.search("bk_[a-z0-9]{12}_", printed.out + printed.err), "a key that opens nothing is not shown"
    assert "--tenants: " in printed.err
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tenants:\n  acme: {rpm: 3}\n", ":2: tenants.acme.rpm: is no field"),
        ("- 3\n", ":1: the file: must have fields"),
    ],
)
def test_a_wrong_file_stays_and_is_told_by_its_line(
    file: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert run("new", "acme", "--tenants", str(file)) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.out == ""
    assert file.read_text() == text


@pytest.mark.parametrize("name", ["Acme", "a b", "", "a" * 65])
def test_what_is_no_name_is_refused(file: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", name, "--tenants", str(file)) == 2
    assert "1 to 64 of a-z 0-9" in capsys.readouterr().err
    assert not file.exists()


def test_a_key_is_digested_and_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    key = new_key()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
    assert run("hash") == 0
    printed = capsys.readouterr().out
    assert hashlib.sha256(key.encode()).hexdigest() in printed
    assert key[-43:] not in printed


@pytest.mark.parametrize("text", ["", "sk-abc", "bk_abcd_" + "a" * 42, "bk_abcd_" + "a" * (1 << 20)])
def test_what_is_no_key_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run("hash") == 2
    error = capsys.readouterr().err
    assert "a key is bk_<id>_<secret>" in error
    assert len(error) < 300


def test_an_expiry_that_is_no_date_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "acme", "--tenants", str(file), "--expires", "next week") == 2
    assert "--expires: is 'next week'; it must be a date" in capsys.readouterr().err
    assert not file.exists()
