"""Tests a worker that raises over one leg, with a real engine: the others get all their tokens, and nothing of it is
left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import types_pb2, worker_pb2
from services.decode.leg import DecodeLeg, DecodeRecord
from services.engine.engine import Engine
from services.engine.schedule.scheduler import Scheduler
from services.kv.handoff_admission import AdmissionPolicy
from services.kv.imports import ImportTable
from services.kv.lease_table import LeaseTable
from services.kv.pool import BlockPool, Holder
from services.prefill.leg import PrefillLeg
from services.worker.host import WorkerHost
from services.worker.session import EventHub, RouterSession
from tests.support.models import tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL, ScriptedRouter, idle, running_worker, until, worker_config

NUM_TOKENS = 12
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("defects"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[..., bool]], None]:
    def poison(owner: Any, method: str, concerns: Callable[..., bool]) -> None:
        real = getattr(owner, method)

        def raises(self: Any, *args: Any, **options: Any) -> Any:
            if concerns(self, *args, **options):
                raise RuntimeError("poison")
            return real(self, *args, **options)

        monkeypatch.setattr(owner, method, raises)

    return poison


def _stopping() -> types_pb2.StoppingParams:
    return types_pb2.StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def _is_internal(failed: worker_pb2.LegFailed) -> bool:
    return failed.status.code == 13 and "poison" not in failed.status.message


async def _decode_beside_poison(host: WorkerHost) -> None:
    router = ScriptedRouter()
    async with router.session(host) as session:
        legs = [router.new_leg() for _ in range(3)]
        for leg in legs:
            await session.send(decode=worker_pb2.DecodeCommand(leg=leg, token_ids=PROMPT, stopping=_stopping()))
        answers = await asyncio.gather(
            session.tokens(legs[0]), session.next("failed", legs[1]), session.tokens(legs[2])
        )
    assert len(answers[0][0]) == len(answers[2][0]) == NUM_TOKENS
    assert _is_internal(answers[1])


@pytest.mark.parametrize(
    ("owner", "method"),
    [(DecodeRecord, "admitted"), (DecodeRecord, "token"), (DecodeRecord, "timings"), (DecodeLeg, "_admitted")],
)
async def test_a_decode_leg_that_raises(model: Path, poisoned: Any, owner: Any, method: str) -> None:
    """A leg may raise in any of its parts. `running_worker` sees at its end that no block, leg or sequence is left."""
    poisoned(owner, method, lambda self, *_: self._command.leg == 2)
    async with running_worker(worker_config(model), DECODE) as host:
        await _decode_beside_poison(host)
        assert host.tally.internal_errors == 1


async def test_a_decode_leg_that_cannot_even_be_closed(model: Path, poisoned: Any) -> None:
    poisoned(DecodeRecord, "token", lambda self, *_: self._command.leg == 2)
    poisoned(DecodeRecord, "close", lambda self, *_: self._command.leg == 2)
    async with running_worker(worker_config(model), DECODE) as host:
        await _decode_beside_poison(host)
        assert host.tally.internal_errors == 2


async def test_a_command_that_cannot_be_begun(model: Path, poisoned: Any) -> None:
    """The session goes on, and with it the legs of the others."""
    poisoned(DecodeLeg, "start", lambda self, *_: self._command.leg == 2)
    async with running_worker(worker_config(model), DECODE) as host:
        await _decode_beside_poison(host)
        assert host.tally.internal_errors == 1


@pytest.mark.parametrize(
    ("owner", "method"),
    [(LeaseTable, "open"), (LeaseTable, "publish"), (LeaseTable, "seal"), (PrefillLeg, "_trace")],
)
async def test_a_prefill_leg_that_raises(model: Path, poisoned: Any, owner: Any, method: str) -> None:
    """The blocks are freed once, whether the lease has taken them over or not."""
    calls: list[int] = []

    def second(*_: Any, **__: Any) -> bool:
        calls.append(1)
        return len(calls) == 2

    poisoned(owner, method, second)
    async with running_worker(worker_config(model), PREFILL) as host:
        router = ScriptedRouter()
        async with router.session(host) as session:
            legs = [router.new_leg() for _ in range(3)]
            for leg in legs:
                command = worker_pb2.PrefillCommand(leg=leg, token_ids=[*PROMPT, leg], stopping=_stopping())
                await session.send(prefill=command)
            done = [asyncio.create_task(session.tokens(leg, 1)) for leg in legs]
            failed = [asyncio.create_task(session.next("failed", leg)) for leg in legs]
            async with asyncio.timeout(20):
                while sum(task.done() for task in done) < 2 or not any(task.done() for task in failed):
                    await asyncio.wait([*done, *failed], timeout=0.05)
            assert [_is_internal(task.result()) for task in failed if task.done()] == [True]
            for task in [*done, *failed]:
                task.cancel()
            await asyncio.gather(*done, *failed, return_exceptions=True)
            for leg in legs:
                await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
        assert host.tally.internal_errors == 1


HELD_IN_VAIN = [
    (Engine, "adopt"),
    (Scheduler, "adopt"),
    (Scheduler, "_register"),
    (EventHub, "register"),
    (RouterSession, "emit"),
    (DecodeRecord, "adopted"),
    (DecodeRecord, "transferred"),
    (DecodeLeg, "_admitted"),
    (AdmissionPolicy, "decide"),
    (BlockPool, "allocate"),
    (ImportTable, "reserve"),
]
"""Where blocks have been taken for a handoff, and have not reached its sequence yet."""


def _hands_over(owner: Any, method: str, *args: Any) -> bool:
    """Returns whether the call is about the decode leg, after its blocks were taken."""
    match (owner, method):
        case (_, "_register"):
            return bool(args[0].block_ids)
        case (_, "register"):
            return isinstance(args[1], DecodeLeg)
        case (_, "emit"):
            return bool(args[0].WhichOneof("event") == "ready")
        case (_, "allocate"):
            return args[1] is Holder.IMPORT
    return True


@pytest.mark.parametrize("local", [False, True], ids=["imported", "adopted in place"])
async def test_blocks_of_a_handoff_have_always_one_owner(model: Path, monkeypatch: Any, local: bool) -> None:
    """They are freed once, whatever raises between taking them and the sequence's first step."""
    router, config = ScriptedRouter(), worker_config(model)
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(running_worker(config, MIXED if local else PREFILL))
        target = source if local else await stack.enter_async_context(running_worker(config, DECODE))
        prefill = await stack.enter_async_context(router.session(source))
        decode = prefill if local else await stack.enter_async_context(router.session(target))

        async def hand_over(expected: str) -> Any:
            legs = router.new_leg(), router.new_leg()
            first = worker_pb2.PrefillCommand(leg=legs[0], token_ids=PROMPT * 20, stopping=_stopping())
            await prefill.send(prefill=first)
            started = await prefill.next("started", legs[0])
            await prefill.tokens(legs[0], 1)
            handoff = worker_pb2.Handoff(lease_id=started.lease_id, source=started.source)
            second = worker_pb2.DecodeCommand(leg=legs[1], token_ids=PROMPT * 20, stopping=_stopping(), handoff=handoff)
            await decode.send(decode=second)
            answer = await (decode.tokens(legs[1]) if expected == "tokens" else decode.next(expected, legs[1]))
            await prefill.send(cancel=worker_pb2.CancelLeg(leg=legs[0]))
            await idle(target)
            await idle(source)
            return answer

        num_met = 0
        for owner, method in HELD_IN_VAIN:
            met: list[int] = []
            real = getattr(owner, method)

            def raises(
                self: Any, *args: Any, at: Any = (owner, method), real: Any = real, met: Any = met, **options: Any
            ) -> Any:
                if not met and _hands_over(*at, *args):
                    met.append(1)
                    raise RuntimeError("poison")
                return real(self, *args, **options)

            with monkeypatch.context() as poisoned:
                poisoned.setattr(owner, method, raises)
                only_one_way = {"adopted": local, "transferred": not local, "decide": not local}
                if not only_one_way.get(method, not local or owner not in (BlockPool, ImportTable)):
                    continue
                assert _is_internal(await hand_over("failed")), (owner, method)
            assert met, (owner, method)
            num_met += 1
            assert target.tally.internal_errors == num_met, (owner, method)
        ids, _ = await hand_over("tokens")
        assert len(ids) == NUM_TOKENS


async def test_a_prefill_leg_whose_end_cannot_even_be_told(model: Path, poisoned: Any) -> None:
    """Its lease ends all the same."""
    poisoned(LeaseTable, "publish", lambda self, *_: True)
    poisoned(RouterSession, "emit", lambda self, event: event.WhichOneof("event") == "failed")
    async with running_worker(worker_config(model), PREFILL) as host:
        router = ScriptedRouter()
        async with router.session(host) as session:
            command = worker_pb2.PrefillCommand(leg=router.new_leg(), token_ids=PROMPT, stopping=_stopping())
            await session.send(prefill=command)
            await session.next("started", command.leg)
            await idle(host)
        assert host.tally.internal_errors == 2


async def test_a_leg_that_cannot_be_given_up_harms_no_other(model: Path, poisoned: Any) -> None:
    """The leg does no harm at its own cancel, nor at the end of the session."""
    poisoned(PrefillLeg, "cancel", lambda self: self.number == 2)
    async with running_worker(worker_config(model), PREFILL) as host:
        router = ScriptedRouter()
        async with router.session(host) as session:
            for leg in [router.new_leg() for _ in range(3)]:
                command = worker_pb2.PrefillCommand(leg=leg, token_ids=[*PROMPT, leg], stopping=_stopping())
                await session.send(prefill=command)
                await session.tokens(leg, 1)
            await session.send(cancel=worker_pb2.CancelLeg(leg=2))
            await session.send(cancel=worker_pb2.CancelLeg(leg=3))
            lease = next(lease for lease in host.leases if lease.listener.number == 2)  # type: ignore[union-attr]
            await until(lambda: len(host.leases) == 2, "the cancel after it is handled")
            assert session.error is None
        host.leases.abort(lease.lease_id, host.clock.now())


@pytest.mark.parametrize("remaining_ms", [(1 << 63) - 1, 10**15])
async def test_a_deadline_in_a_million_years(model: Path, remaining_ms: int) -> None:
    async with running_worker(worker_config(model), DECODE) as host:
        router = ScriptedRouter()
        async with router.session(host) as session:
            command = worker_pb2.DecodeCommand(
                leg=router.new_leg(), token_ids=PROMPT, stopping=_stopping(), remaining_ms=remaining_ms
            )
            await session.send(decode=command)
            ids, _ = await session.tokens(command.leg)
        assert len(ids) == NUM_TOKENS
