"""Tests the gate: who is let in, what a new file changes for those who are, and what a wrong one does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.clock import MonotonicClock
from services.core.errors import ConfigError, InvalidKey, QuotaExceeded
from services.router.tenants import gate as gate_module
from services.router.tenants.gate import Gate
from services.router.tenants.tenant import OPEN
from services.rpc import authentication
from tests.support.patience import HANG_S
from tests.support.tenants import TenantsFile

POLL_S = 0.02


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(acme={}, other={"limits": {"concurrent_requests": 1}})
    return file


def gate_of(file: TenantsFile, wall_s: Callable[[], float] = lambda: 0.0, poll_s: float = POLL_S) -> Gate:
    return Gate(str(file.path), MonotonicClock(), wall_s=wall_s, poll_s=poll_s)


def name_of(gate: Gate, file: TenantsFile, name: str) -> str | None:
    """Returns whom the gate takes the key of that tenant for."""
    try:
        return gate.tenant_of([file.headers(name)["authorization"]]).name
    except InvalidKey:
        return None


@contextlib.asynccontextmanager
async def watching(gate: Gate) -> AsyncIterator[None]:
    task = asyncio.create_task(gate.watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  # nothing tells when a file was read
            await asyncio.sleep(0.005)


async def test_without_a_file_everybody_is_the_open_tenant() -> None:
    gate = Gate("", MonotonicClock())
    assert gate.is_open
    for given in ([], ["Bearer x"], ["a", "b"]):
        assert gate.tenant_of(given) is OPEN
    with gate.visit(OPEN) as visit:
        visit.reserve(10**12)
    await gate.watch()


def test_who_has_a_key_is_its_tenant(file: TenantsFile) -> None:
    gate = gate_of(file)
    assert (name_of(gate, file, "acme"), name_of(gate, file, "other")) == ("acme", "other")
    for given in ([], [""], ["Bearer x"], [file.headers("acme")["authorization"]] * 2):
        with pytest.raises(InvalidKey):
            gate.tenant_of(given)


def test_keys_expire_by_the_wall_clock(file: TenantsFile) -> None:
    now = [0.0]
    file.write(acme={"keys": [file.entry("acme") | {"expires": "2001-09-09T01:46:40Z"}]})
    gate = gate_of(file, lambda: now[0])
    for now_s, expected in ((1e9 - 1, "acme"), (1e9, None), (1e9 - 1, "acme")):
        now[0] = now_s
        assert name_of(gate, file, "acme") == expected


def test_a_place_is_given_back_however_the_request_ends(file: TenantsFile) -> None:
    gate = gate_of(file)
    other = gate.tenant_of([file.headers("other")["authorization"]])
    with pytest.raises(ZeroDivisionError):
        with gate.visit(other):
            raise ZeroDivisionError
    with gate.visit(other), pytest.raises(QuotaExceeded):
        with gate.visit(other):
            raise AssertionError("there is one place")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("tenants: {a: 1}", "tenants.yaml:1: tenants.a: must have fields"), (None, "No such file")],
)
def test_a_router_does_not_start_with_a_wrong_file(file: TenantsFile, text: str | None, expected: str) -> None:
    if text is None:
        file.path.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"^--tenants: ") as refused:
        gate_of(file)
    assert expected in str(refused.value)


def test_a_file_that_everybody_may_write_is_refused(file: TenantsFile) -> None:
    os.chmod(file.path, 0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        gate_of(file)
    file.path.unlink()
    os.mkfifo(file.path, 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        gate_of(file)


async def test_a_changed_file_is_taken_while_requests_go_on(file: TenantsFile) -> None:
    """A key and a tenant come, a key and a tenant go; whoever is inside stays, in a tenant that is no more, too."""
    gate = gate_of(file)
    old = gate.tenant_of([file.headers("other")["authorization"]])
    async with watching(gate):
        with gate.visit(old) as visit:
            file.write(acme={"limits": {"requests_per_s": 0.001}}, new={})
            await until(lambda: name_of(gate, file, "new") == "new")
            assert name_of(gate, file, "other") is None
            visit.reserve(100)
            file.write(acme={}, other={"limits": {"concurrent_requests": 1}})
            await until(lambda: name_of(gate, file, "other") == "other")
            with pytest.raises(QuotaExceeded), gate.visit(old):
                raise AssertionError("the place of before is still taken")
        with gate.visit(old):
            pass


async def test_a_wrong_file_changes_nothing_and_is_told_once(
    file: TenantsFile, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(file)
    async with watching(gate):
        file.write_text("tenants:\n  acme:\n    limits: {tokens: 5}\n")
        await until(lambda: "the 2 tenants that were read before stay" in caplog.text)
        assert "tenants.yaml:3: tenants.acme.limits.tokens: is no field" in caplog.text
        file.path.unlink()
        await until(lambda: "No such file" in caplog.text)
        assert name_of(gate, file, "acme") == "acme"
        for _ in range(5):
            await asyncio.sleep(POLL_S)
        assert caplog.text.count("read before stay") == 2
        file.write(new={})
        await until(lambda: name_of(gate, file, "new") == "new")
    assert name_of(gate, file, "acme") is None


async def test_a_file_is_read_once_it_has_been_the_same_twice(
    file: TenantsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then somebody may be writing it."""
    gate, read = gate_of(file, poll_s=0.001), gate_module._read
    looks, reads = list[str](), list[int]()

    def stamp(path: str) -> int:
        looks.append(path)
        return min(len(looks), 5)

    def noted(path: str) -> Any:
        reads.append(len(looks))
        return read(path)

    monkeypatch.setattr(gate_module, "stamp_of", stamp)
    monkeypatch.setattr(gate_module, "_read", noted)
    async with watching(gate):
        await until(lambda: len(looks) > 10)
    assert reads == [6]


async def test_a_request_that_comes_while_the_file_is_read_has_its_new_limits(file: TenantsFile) -> None:
    gate = gate_of(file)
    old = gate.tenant_of([file.headers("acme")["authorization"]])
    async with watching(gate):
        file.write(acme={"limits": {"concurrent_requests": 1}}, new={})
        await until(lambda: name_of(gate, file, "new") == "new")
        with gate.visit(old), pytest.raises(QuotaExceeded), gate.arrival(old):
            raise AssertionError("there is one place")


def test_prompts_of_one_call_come_in_together_and_leave_nothing(file: TenantsFile) -> None:
    """It also holds for those that never had a visit of their own, and for tokens that were taken for them."""
    file.write(acme={"limits": {"concurrent_requests": 4, "tokens_per_min": 60, "burst_tokens": 1000}})
    gate = gate_of(file)
    acme = gate.tenant_of([file.headers("acme")["authorization"]])
    gate.divide(2)
    with gate.party(acme, 4) as party:
        with pytest.raises(QuotaExceeded), gate.visit(acme):
            raise AssertionError("all places are taken")
        with gate.visit(acme, party) as first, gate.visit(acme, party) as second:
            first.reserve(300, 900)
            second.reserve(200, 900)
            assert (first.num_reserved, second.num_reserved) == (300, 200)
            first.num_used = 100
    [quota] = gate.quotas()
    assert quota.num_live == 0
    assert quota.report(gate._clock.now()).buckets[1].used == pytest.approx(100)


async def test_a_file_that_could_not_be_opened_is_tried_again(
    file: TenantsFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(file)
    read = gate_module._read

    def no_descriptors(_: str) -> Any:
        raise ConfigError("too many open files") from OSError()

    monkeypatch.setattr(gate_module, "_read", no_descriptors)
    async with watching(gate):
        file.write(new={})
        await until(lambda: "too many open files" in caplog.text)
        await asyncio.sleep(5 * POLL_S)
        assert caplog.text.count("too many open files") == 1, "it is said once"
        monkeypatch.setattr(gate_module, "_read", read)
        await until(lambda: name_of(gate, file, "new") == "new")


async def test_a_file_whose_mode_was_mended_is_read(file: TenantsFile, caplog: pytest.LogCaptureFixture) -> None:
    gate = gate_of(file)
    async with watching(gate):
        file.write(new={})
        os.chmod(file.path, 0o666)
        await until(lambda: "chmod o-w" in caplog.text)
        os.chmod(file.path, 0o600)
        await until(lambda: name_of(gate, file, "new") == "new")


def test_a_folder_in_its_place_costs_no_descriptor(file: TenantsFile) -> None:
    file.path.unlink()
    file.path.mkdir()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(ConfigError):
            gate_of(file)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_body_that_is_read_has_a_place(file: TenantsFile) -> None:
    gate = gate_of(file)
    other = gate.tenant_of([file.headers("other")["authorization"]])
    with gate.arrival(other), pytest.raises(QuotaExceeded), gate.arrival(other):
        raise AssertionError("there is one place")
    with gate.arrival(other):
        pass
    with gate.arrival(other):
        pass


async def test_who_asks_need_not_wait_for_the_next_look(file: TenantsFile) -> None:
    gate = gate_of(file, poll_s=3600.0)
    async with watching(gate):
        file.write(new={})
        gate.reload_soon()
        await until(lambda: name_of(gate, file, "new") == "new")


def test_refusals_are_logged_once_a_second(file: TenantsFile, caplog: pytest.LogCaptureFixture) -> None:
    gate = gate_of(file)
    for _ in range(1000):
        gate.log_refusal(InvalidKey("the API key is not valid"), "/v1/models", lambda: "203.0.113.7")
    (record,) = [each for each in caplog.records if "refused" in each.message]
    assert record.message == "refused /v1/models of 203.0.113.7: the API key is not valid"


def test_a_line_says_how_many_refusals_have_none(
    file: TenantsFile, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(authentication, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gate = gate_of(file)
    for second in range(3):
        now[0] = 100.0 + second
        for _ in range(3):
            gate.log_refusal(InvalidKey("no"), "/v1/models", lambda: "")
    lines = [each.message.partition(": ")[2] for each in caplog.records if "an unknown peer" in each.message]
    assert lines == ["no", "no (2 more before)", "no (2 more before)"]
