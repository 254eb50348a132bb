"""Tests `VllmEngine` over a vLLM that tells what a test says, in the order in which the test says it."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import Overloaded
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Mode,
    SamplingParams,
    Sequence,
    StoppingParams,
    Token,
)
from services.kv.pool import Holder
from services.vllm import messages
from services.vllm.messages import JsonMessage
from services.vllm.process import VllmProcess
from tests.support.told_vllm import BLOCK, ToldVllm

PROMPT = [3 + at % 200 for at in range(40)]


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[ToldVllm]:
    with ToldVllm(tmp_path) as vllm:
        yield vllm
        vllm.engine.check_idle()


def new_sequence(vllm: ToldVllm, seq_id: int, *, max_tokens: int = 9, mode: Mode = Mode.GENERATE) -> Sequence:
    stopping = StoppingParams(max_tokens)
    return Sequence(seq_id, list(PROMPT), len(PROMPT), SamplingParams(), stopping, vllm.clock.now(), mode=mode)


def passed_on(vllm: ToldVllm, seq_id: int = 1) -> Sequence:
    """Returns a sequence that vLLM has begun with."""
    sequence = new_sequence(vllm, seq_id)
    vllm.engine.add(sequence)
    vllm.settle()
    vllm.tell(vllm.core, messages.STEP, begun=[[seq_id, 0]], preempted=[])
    return sequence


def test_a_step_that_does_not_end_shows_also_when_nobody_waits_for_it_any_more(vllm: ToldVllm) -> None:
    """Its sequences were cancelled, their slots cannot be freed, and what comes may find no room: that the step stands
    still is all that there is to see."""
    sequence = passed_on(vllm)
    vllm.engine.abort(sequence.seq_id)
    vllm.clock.advance(7.0)
    assert vllm.engine.stats().num_running == 0
    assert vllm.engine.stats().current_step_ms == 7000.0
    vllm.tell(vllm.ranks[0], messages.GONE, ids=[sequence.seq_id])
    vllm.clock.advance(7.0)
    assert vllm.engine.stats().current_step_ms == 0.0, "nothing is to be computed"


def test_an_adopted_lease_waits_for_blocks_to_grow_into_and_holds_none(vllm: ToldVllm) -> None:
    """Its lease has those of the prompt alone, and whoever has the others may need long."""
    engine, adopted = vllm.engine, new_sequence(vllm, 1, max_tokens=100)
    lease = engine.reserve(adopted, lambda num_fresh, room: None)
    engine.release(lease.spare, Holder.IMPORT)
    others = [engine.reserve(new_sequence(vllm, 2, max_tokens=999), lambda num_fresh, room: None) for _ in range(2)]
    engine.adopt(adopted, [], lease.fresh, 7, Holder.IMPORT)
    vllm.settle()
    assert not vllm.sent
    stats = engine.stats()
    assert (stats.num_waiting, stats.ledger.active) == (1, 0)
    for other in others:
        engine.release([*other.fresh, *other.spare], Holder.IMPORT)
    vllm.settle()
    (passed,) = vllm.sent
    assert passed["tokens"] == [*PROMPT, 7]
    assert passed["kv"]["num_imported"] == 32, "the full blocks of its prompt were kept"
    vllm.tell(vllm.core, messages.STEP, begun=[[1, 32]], preempted=[])
    assert not vllm.events, "it was admitted with its lease"
    engine.abort(1)
    vllm.tell(vllm.ranks[0], messages.GONE, ids=[1])


def test_leases_leave_half_of_a_mixed_workers_pool_also_to_prompts_that_come_at_once(tmp_path: Path) -> None:
    """What vLLM has not begun with has no lease yet, and will have one."""
    with ToldVllm(tmp_path, num_blocks=8, limit_leased_blocks=True) as vllm:
        for seq_id in (1, 2):
            vllm.engine.add(new_sequence(vllm, seq_id, mode=Mode.PREFILL_ONLY))
        vllm.settle()
        assert [message["id"] for message in vllm.sent] == [1]
        vllm.tell(vllm.core, messages.STEP, begun=[[1, 0]], preempted=[])
        assert len(vllm.sent) == 1
        (lease,) = vllm.events
        assert isinstance(lease, Admitted)
        vllm.engine.release(lease.block_ids, Holder.LEASE)
        vllm.settle()
        assert [message["id"] for message in vllm.sent] == [1, 2]


def test_a_defect_is_known_before_all_of_vllm_is_gone(tmp_path: Path) -> None:
    """Streams go on elsewhere while the kernel takes back gigabytes; the worker's own end waits for that."""
    with ToldVllm(tmp_path) as vllm:
        vllm.can_end.clear()
        joining, stopping = (threading.Thread(target=each) for each in (vllm.engine.join, vllm.engine.stop))
        vllm.fail("a rank has ended")
        joining.start()
        joining.join(10.0)
        assert not joining.is_alive()
        assert (vllm.engine.alive, vllm.engine.why_over) == (False, "a rank has ended")
        stopping.start()
        stopping.join(0.1)
        assert stopping.is_alive()
        vllm.can_end.set()
        stopping.join(10.0)
        assert not stopping.is_alive()


def test_each_rank_has_its_own_part_of_a_slot(tmp_path: Path) -> None:
    with ToldVllm(tmp_path, num_ranks=2) as vllm:
        first, second = vllm.forms
        assert first["offset"] == 0
        assert second["offset"] * 2 == first["slot_bytes"] == second["slot_bytes"] == vllm.engine.cache.block_bytes


class Scheduler:
    """Tells what vLLM could, at random: sequences begin, are refused, compute, are robbed of their blocks and end, and
    the last output of one and the ranks' words that it is gone come in any order."""

    def __init__(self, vllm: ToldVllm, randomness: random.Random) -> None:
        self._vllm, self._randomness = vllm, randomness
        self._num_heard = 0
        self._requests: dict[int, JsonMessage] = {}
        self._begun: dict[int, int] = {}
        """Tokens computed, of those that have begun."""
        self._outboxes: dict[int, list[tuple[VllmProcess, str, dict[str, Any]]]] = {}
        """What each process has yet to tell."""

    def hear(self) -> None:
        heard, self._num_heard = self._vllm.sent[self._num_heard :], len(self._vllm.sent)
        for message in heard:
            if message["kind"] == messages.ADD:
                assert message["id"] not in self._requests
                self._requests[message["id"]] = message
            elif message["id"] in self._requests:
                self._finish(message["id"], "abort")

    @property
    def has_work(self) -> bool:
        return bool(self._requests or any(self._outboxes.values()))

    def act(self) -> None:
        if self._randomness.random() < 0.3:  # a step or more may come between
            self.hear()
        outboxes = [outbox for outbox in self._outboxes.values() if outbox]
        if outboxes and (not self._requests or self._randomness.random() < 0.5):
            peer, kind, fields = self._randomness.choice(outboxes).pop(0)
            self._vllm.tell(peer, kind, **fields)
        elif self._requests:
            seq_id = self._randomness.choice(sorted(self._requests))
            (self._compute if seq_id in self._begun else self._begin)(seq_id)

    def _begin(self, seq_id: int) -> None:
        kv, chance = self._requests[seq_id]["kv"], self._randomness.random()
        if chance < 0.05:
            del self._requests[seq_id]
            self._vllm.tell(self._vllm.front, messages.REFUSED, id=seq_id, error="it is refused")
        elif chance < 0.2 and kv["num_imported"]:
            self._finish(seq_id, "error")
        else:
            self._begun[seq_id] = kv["num_imported"]
            self._step(begun=[[seq_id, kv["num_imported"]]])

    def _compute(self, seq_id: int) -> None:
        request = self._requests[seq_id]
        if self._randomness.random() < 0.03:
            self._begun[seq_id] = 0
            self._step(preempted=[seq_id])
            return
        tokens, kv = request["tokens"], request["kv"]
        self._begun[seq_id] = min(self._begun[seq_id] + self._randomness.choice([BLOCK, 30, 90]), len(tokens))
        num_saved = min(self._begun[seq_id], kv["num_exported"])
        if num_saved > kv["num_imported"]:
            for rank in self._randomness.sample(self._vllm.ranks, len(self._vllm.ranks)):
                whole = num_saved if num_saved == kv["num_exported"] else num_saved // BLOCK * BLOCK
                self._vllm.tell(rank, messages.SAVED, id=seq_id, num_tokens=whole)
        if self._begun[seq_id] == len(tokens):
            self._sample(seq_id, request)

    def _sample(self, seq_id: int, request: JsonMessage) -> None:
        num_answers = 1 + len(request["sampling"]["further"])
        token_ids = [self._randomness.randrange(300) for _ in range(num_answers)]
        if num_answers > 1:
            request["sampling"] = {**request["sampling"], "further": []}
            position = len(request["tokens"]) - request["sampling"]["num_prompt"]
            told = [[token_id, None, []] for token_id in token_ids]
            self._vllm.tell(self._vllm.ranks[0], messages.SAMPLED, id=seq_id, position=position, tokens=told)
        request["tokens"], request["max_tokens"] = [*request["tokens"], token_ids[0]], request["max_tokens"] - 1
        if request["max_tokens"]:
            self._say(seq_id, token_ids[:1], None)
        else:
            self._finish(seq_id, "length", token_ids[:1])

    def _step(self, begun: list[Any] | None = None, preempted: list[int] | None = None) -> None:
        self._vllm.tell(self._vllm.core, messages.STEP, begun=begun or [], preempted=preempted or [])

    def _say(self, seq_id: int, token_ids: list[int], reason: str | None) -> None:
        said = (self._vllm.front, messages.OUTPUT, {"outputs": [[seq_id, token_ids, reason]]})
        self._outboxes.setdefault(-1, []).append(said)

    def _finish(self, seq_id: int, reason: str, token_ids: Tokens[int] = ()) -> None:
        del self._requests[seq_id]
        self._begun.pop(seq_id, None)
        self._say(seq_id, list(token_ids), reason)
        for rank in self._vllm.ranks:
            self._outboxes.setdefault(rank.rank, []).append((rank, messages.GONE, {"ids": [seq_id]}))


class Clients:
    """Adds and adopts sequences, and gives them up, at random."""

    def __init__(self, vllm: ToldVllm, randomness: random.Random) -> None:
        self._vllm, self._randomness = vllm, randomness
        self._ids = itertools.count(1)
        self._living: dict[int, Sequence] = {}
        self._made: dict[int, Sequence] = {}
        self._given_up: dict[int, int] = {}
        """How many events there were at the time."""
        self._num_ended = 0

    def act(self) -> None:
        chance = self._randomness.random()
        if chance < 0.3 and (known := sorted(self._living.keys() - self._unborn())):
            self._give_up(self._randomness.choice(known))
        elif chance < 0.5:
            self.end_leases(self._adopt_lease)
        elif chance < 0.7:
            self._adopt()
        else:
            self._add()
        self._vllm.settle()

    def _unborn(self) -> set[int]:
        """Returns the further answers that have no token yet, which no engine can abort."""
        further = {each.seq_id for sequence in self._living.values() for each in sequence.further}
        return further - {event.seq_id for event in self._vllm.events if isinstance(event, Token)}

    def give_up(self) -> None:
        for seq_id in sorted(self._living):
            self._give_up(seq_id)
        self._vllm.settle()

    def end_leases(self, adopt: Callable[[Admitted], bool] = lambda admitted: False) -> None:
        """Releases the leases that `adopt` does not adopt."""
        events, self._num_ended = self._vllm.events[self._num_ended :], len(self._vllm.events)
        for event in events:
            if isinstance(event, Admitted) and self._made[event.seq_id].mode is Mode.PREFILL_ONLY and not adopt(event):
                self._vllm.engine.release(event.block_ids, Holder.LEASE)

    def _adopt_lease(self, lease: Admitted) -> bool:
        """Goes on from a lease of this engine's own if its token is known and does not end it."""
        source = self._made[lease.seq_id]
        said = [event for event in self._vllm.events if isinstance(event, Token) and event.seq_id == lease.seq_id]
        if not said or said[0].finish is not None:
            return False
        sequence = self._new(Mode.GENERATE)
        sequence.token_ids = source.token_ids[: source.num_prompt_tokens]
        sequence.num_prompt_tokens, sequence.stopping = source.num_prompt_tokens, source.stopping
        self._vllm.engine.adopt(sequence, [], lease.block_ids, said[0].token.token_id, Holder.LEASE)
        return True

    def check(self) -> None:
        """Asserts that each was admitted at most once and then said, and that nothing came after an end."""
        for seq_id in self._made:
            found = [(at, event) for at, event in enumerate(self._vllm.events) if event.seq_id == seq_id]
            assert sum(isinstance(event, Admitted) for _, event in found) <= 1
            ends = [isinstance(event, Failed) or getattr(event, "finish", None) is not None for _, event in found]
            assert not any(ends[:-1]), "nothing comes after an end"
            positions = [event.position for _, event in found if isinstance(event, Token)]
            assert positions == list(range(positions[0], positions[0] + len(positions))) if positions else True
            assert all(at < self._given_up.get(seq_id, at + 1) for at, _ in found), "nothing comes after an abort"

    def _give_up(self, seq_id: int) -> None:
        del self._living[seq_id]
        self._vllm.engine.abort(seq_id)
        self._vllm.settle()
        self._given_up[seq_id] = len(self._vllm.events)

    def _new(self, mode: Mode) -> Sequence:
        length = self._randomness.choice([1, 16, 40, 120])
        prompt = [self._randomness.randrange(2)] * length  # so that prefixes are common
        max_tokens = self._randomness.choice([1, 2, 6, 90])
        sequence = Sequence(
            next(self._ids), prompt, length, SamplingParams(), StoppingParams(max_tokens), 0.0, mode=mode
        )
        self._living[sequence.seq_id] = sequence
        self._made[sequence.seq_id] = sequence
        return sequence

    def _add(self) -> None:
        mode = self._randomness.choice([Mode.GENERATE, Mode.PREFILL_ONLY])
        sequence = self._new(mode)
        if self._randomness.random() < 0.2:
            for _ in range(2):
                other = self._new(mode)
                other.token_ids, other.num_prompt_tokens = list(sequence.token_ids), sequence.num_prompt_tokens
                sequence.further.append(other)
        self._vllm.engine.add(sequence)

    def _adopt(self) -> None:
        sequence, engine = self._new(Mode.GENERATE), self._vllm.engine
        engine.hash_prompt(sequence)
        try:
            reserved = engine.reserve(sequence, lambda num_fresh, room: None)
        except Overloaded:
            del self._living[sequence.seq_id]
            return
        engine.adopt(sequence, reserved.prefix, reserved.fresh, 7, Holder.IMPORT, spare=reserved.spare)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_vllm_tells_in_whatever_order_nothing_is_left(tmp_path: Path, seed: int) -> None:
    randomness = random.Random(seed)
    with ToldVllm(tmp_path, num_ranks=2, num_blocks=20, max_num_seqs=6) as vllm:
        scheduler, clients = Scheduler(vllm, randomness), Clients(vllm, randomness)
        for _ in range(300):
            (clients if randomness.random() < 0.2 else scheduler).act()
        clients.give_up()
        scheduler.hear()
        while scheduler.has_work:
            scheduler.act()
        clients.end_leases()
        vllm.settle()
        vllm.engine.check_idle()
        clients.check()
