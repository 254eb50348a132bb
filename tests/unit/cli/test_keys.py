"""Tests `baton keys`: what it prints for a tenants file opens with the key that it printed."""

from __future__ import annotations

import hashlib
import io
import json

import pytest

from services.cli.main import main
from services.router.tenants.keys import KeyRing, new_key
from services.router.tenants.tenants_file import read_tenants


def run(*argv: str) -> int:
    return main(["keys", *argv])


def test_a_new_key_opens_by_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "--expires", "2027-01-31") == 0
    key, _, rest = capsys.readouterr().out.partition("\n")
    entry = "\n".join(f"      {line}" for line in rest.splitlines())
    tenants = read_tenants(f"tenants:\n  acme:\n    keys:\n{entry}\n".encode(), "t.yaml")
    assert KeyRing(tenants.values()).tenant_of(f"Bearer {key}", 0.0) is tenants["acme"]
    assert tenants["acme"].keys[0].expires_unix_s == 1_801_353_600
    assert key.split("_", 2)[2] not in rest


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"key", "id", "sha256"}
    assert hashlib.sha256(told["key"].encode()).hexdigest() == told["sha256"]
    assert told["key"].startswith(f"bk_{told['id']}_")


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


def test_an_expiry_that_is_no_date_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", "--expires", "next week") == 2
    assert "--expires: is 'next week'; it must be a date" in capsys.readouterr().err
