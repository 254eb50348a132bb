"""Carries out DecodeCommands, each from its arrival to its last token.

Owns: the leg's place in the session, in the hub and in the engine, and the times of its events, for its spans and for
the timings in its last message. Never: how KV is taken in (`import_intake`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import Any

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import BatonError, DeadlineExceeded, LayoutMismatch, unforeseen
from services.decode.import_intake import Held, ImportIntake
from services.engine.config import StepReport
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Mode,
    Preempted,
    PromptScored,
    Resumed,
    Sequence,
    SequenceEvent,
    Token,
)
from services.kvtransfer.client import FetchOutcome
from services.rpc.logging import log_ids
from services.rpc.names import Attr, Event, Span
from services.rpc.plain import enum_word
from services.rpc.telemetry import Attributes, Value
from services.worker.handoffs import FirstTokens, HandoffLeg, Refused
from services.worker.host import WorkerHost
from services.worker.session import RouterSession, prompt_tokens_of, tokens_of


class DecodePhase:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._intake = ImportIntake(host)

    def begin(self, session: RouterSession, command: worker_pb2.DecodeCommand) -> None:
        DecodeLeg(self._host, self._intake, session, command).start()


class DecodeLeg(HandoffLeg):
    """A decode leg is registered in `session.legs` from `start` until `_close`.

    It may carry several answers to one prompt. Each is a sequence of its own once it has its first token, ends by
    itself, and can be given up alone; what fails one of them fails the leg, since the router computes anew whatever has
    not ended.
    """

    def __init__(
        self, host: WorkerHost, intake: ImportIntake, session: RouterSession, command: worker_pb2.DecodeCommand
    ) -> None:
        super().__init__(host, session, command)
        self._intake = intake
        self._command = command
        self._sequences = host.new_sequences(command, Mode.GENERATE)
        """One for each answer, by index."""
        self._sequence = self._sequences[0]
        self._index_of = {sequence.seq_id: index for index, sequence in enumerate(self._sequences)}
        self._open = set(self._index_of.values())
        """The answers that have neither ended nor been given up."""
        self._begun = False
        """Whether each answer goes on by itself. Before, the engine knows at most the first, which computes for all."""
        self._record = DecodeRecord(host, command)
        self._held: Held | None = None
        """The blocks that the sequence does not have yet."""
        self._task: asyncio.Task[None] | None = None
        """Takes the KV in; for a sequence without a handoff, compiles its constraint and brings its prefix."""
        self._compiling: asyncio.Task[BatonError | None] | None = None
        """Compiles the constraint while the KV is taken in."""
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the leg: without a handoff the engine queues the sequence, else the handoff's KV is taken in.

        A handoff from another worker is admitted or refused as soon as its tokens are hashed; one of this worker's own
        is admitted at once.
        """
        self._session.legs[self.number] = self
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        if not self._command.HasField("handoff"):
            for sequence in self._sequences:
                self._host.hub.register(sequence.seq_id, self)
            if self._host.has_to_prepare(self._command):
                self._run(self._add_prepared, f"prepare leg {self.number}")
            else:
                self._add()
        elif self._intake.is_local(self._command.handoff):
            self._admitted(0)
            self._run(self._adopt, f"adopt leg {self.number}")
        else:
            self._run(self._import, f"import leg {self.number}")

    def cancel(self) -> None:
        """Gives the leg up: its sequence leaves after the step in flight, an import's blocks after their last copy."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()  # the leg closes when its task has ended
        else:
            for sequence in self._sequences:
                self._host.engine.abort(sequence.seq_id)
            self._close()

    def cancel_answer(self, index: int) -> None:
        """Gives one answer up: its sequence leaves after the step in flight, or as soon as it has begun."""
        if self._over or index not in self._open:
            return
        self._open.discard(index)
        if not self._open:
            self.cancel()
        elif self._begun:
            self._host.engine.abort(self._sequences[index].seq_id)

    def _add(self) -> None:
        self._sequence.further = self._sequences[1:]
        self._host.engine.add(self._sequence)

    async def _add_prepared(self) -> None:
        if (error := await self._host.prepare(self._session, self._sequences, self._command)) is not None:
            self._fail(error)
            return
        self._task = None
        self._add()

    # -- how KV comes in -----------------------------------------------------------------------------------------------

    async def _import(self) -> None:
        try:
            await self._host.hash_prompt(self._sequence)
            self._held = self._intake.reserve(self._command, self._sequence)
        except Refused as error:
            self._emit(error.event(self.number))
        except LayoutMismatch as error:
            self._import_failed(error)
        else:
            self._admitted(len(self._held.prefix) * self._host.engine.info.block_size)
            self._begin_compiling()
            await self._fetch(self._held)

    def _run(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._task = self._host.spawn(self._reporting_defects(work), name)
        self._task.add_done_callback(lambda _: self._task_over())

    async def _reporting_defects(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs the work, and reports to the router any exception that the work does not handle itself.

        Such an exception is no failed import, which another worker could repeat, but a defect of this one.
        """
        try:
            await work()
        except Exception as error:
            self._host.defect(error)
            self._fail(unforeseen(error))

    def _task_over(self) -> None:
        """Closes the leg if its task has ended and the sequence did not reach the engine.

        This holds for a task that was cancelled before it ran, too.
        """
        if self._task is not None:
            self._task = None
            self._close()

    async def _fetch(self, held: Held) -> None:
        try:
            # A transfer does not know its request; its log lines get the ids here.
            with log_ids(self._command.request_id, self._command.traceparent):
                outcome = await self._intake.fetch(self._command, held)
        except Exception as error:  # whatever went wrong, the router must learn of it
            self._import_failed(error)
            return
        self._record.transferred(outcome)
        self._ready(transport=outcome.transport, num_bytes=outcome.num_bytes, copy_ms=outcome.copy_s * 1000)
        if not outcome.ready or await self._is_constrained():
            self._take_over((outcome.first_token, *outcome.other_first_tokens), held if outcome.ready else None)

    async def _adopt(self) -> None:
        started_s = self._host.clock.now()
        self._begin_compiling()
        await self._host.hash_prompt(self._sequence)
        try:
            first_tokens, self._held = await self._intake.adopt(self._command)
        except Exception as error:
            self._import_failed(error)
            return
        self._record.adopted(started_s, len(self._held.block_ids) if self._held is not None else 0)
        self._ready()
        if self._held is None or await self._is_constrained():
            self._take_over(first_tokens, self._held)

    def _begin_compiling(self) -> None:
        """Begins to compile the constraint, if there is one: beside the transfer, which nothing keeps waiting."""
        if self._command.HasField("constraint"):
            compiling = self._host.constrain(self._sequences, self._command)
            self._compiling = asyncio.create_task(compiling, name=f"constrain leg {self.number}")

    async def _is_constrained(self) -> bool:
        """Waits until each sequence has its constraint, if there is one. If that cannot be, the leg fails, and it
        returns False."""
        error = None if self._compiling is None else await self._compiling
        if error is not None:
            self._fail(error)
        return error is None

    def _take_over(self, first_tokens: FirstTokens, held: Held | None) -> None:
        """Repeats the first tokens to the router, and lets the sequences that these do not end join the batch.

        `held` has the blocks; None if all answers have ended.
        """
        if self._over:  # the leg was cancelled just when the Release was answered
            return
        going_on: list[tuple[Sequence, int]] = []
        for index, (sequence, first_token) in enumerate(zip(self._sequences, first_tokens, strict=True)):
            tokens = types_pb2.SequenceTokens()
            tokens.CopyFrom(first_token)
            tokens.leg, tokens.index = self.number, index
            tokens.ClearField("timings")
            self._emit(worker_pb2.LegEvent(tokens=tokens))
            if tokens.HasField("finish"):
                self._open.discard(index)
            if index in self._open:
                going_on.append((sequence, tokens.token_ids[0]))
        if held is not None and going_on:
            self._log(logging.INFO, "decode begins")
            for sequence, _ in going_on:
                self._host.hub.register(sequence.seq_id, self)
            self._intake.enter(going_on, held)
            self._begun = True
            self._task = None

    # -- what the engine reports ---------------------------------------------------------------------------------------

    def on_event(self, event: SequenceEvent, report: StepReport) -> None:
        match event:
            case Admitted():
                self._record.admitted(event.now)
                self._admitted(event.num_cached)
            case PromptScored():
                self._session.emit(prompt_tokens_of(self.number, event))
            case Token():
                self._token(event, report)
            case Preempted():
                self._record.preempted(event.now)
            case Resumed():
                self._admitted(event.num_cached)  # for the router it is as when it began: others may have computed that
            case Failed():
                if not self._begun or self._index_of[event.seq_id] in self._open:  # before, the first is there for all
                    self._fail(event.error)

    def _token(self, event: Token, report: StepReport) -> None:
        index, self._begun = self._index_of[event.seq_id], True
        if index not in self._open:  # it was given up before it had begun, or in this step
            self._host.engine.abort(event.seq_id)
            return
        self._record.token(event.now, report, index)
        tokens = tokens_of(self.number, event, index)
        if event.finish is not None:
            tokens.finish.timings.CopyFrom(self._record.timings())
            self._open.discard(index)
        self._session.emit(worker_pb2.LegEvent(tokens=tokens))
        if not self._open:
            if self._command.HasField("keep_at"):
                self._host.prefixes.offer(self._command.keep_at, self._host.engine.prefix_hashes(self._sequence))
            for sequence in self._sequences[1:] and self._sequences:  # what was given up may just have begun
                self._host.engine.abort(sequence.seq_id)
            self._close()

    def on_defect(self, event: SequenceEvent, error: Exception) -> None:
        self._fail(unforeseen(error))

    # -- what the router is told ---------------------------------------------------------------------------------------

    def _admitted(self, num_cached: int) -> None:
        self._emit(worker_pb2.LegEvent(admitted=worker_pb2.DecodeAdmitted(leg=self.number, cached_tokens=num_cached)))

    def _ready(self, **copied: Any) -> None:
        """Reports valid KV at once, with what was `copied`.

        The source reports the end of its lease, and soon after that a leg without KV is given up.
        """
        if not self._over:
            self._emit(worker_pb2.LegEvent(ready=worker_pb2.ImportReady(leg=self.number, **copied)))

    def _deadline_passed(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed on the decode worker"))

    def _close(self) -> None:
        self._over = True
        if self._held is not None:
            self._intake.give_up(self._held)
        if self._compiling is not None:
            self._compiling.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        for sequence in self._sequences:
            self._host.hub.unregister(sequence.seq_id)
        self._host.leg_over(self._session, self.number)
        self._record.close()


class DecodeRecord:
    """Keeps the record of one decode leg.

    `admitted`, `transferred`, `adopted`, `token` and `preempted` are called as these happen, and `close`, which writes
    the spans, once at the end.
    """

    def __init__(self, host: WorkerHost, command: worker_pb2.DecodeCommand) -> None:
        self._host = host
        self._command = command
        self._arrival_s = host.clock.now()
        self._admitted_s: float | None = None  # when the engine admitted the sequence, if it prefills here
        self._ready_s: float | None = None  # when the KV was taken over, if it was
        self._first_step_s = 0.0
        self._first_step_ended_s = 0.0
        self._last_token_s = 0.0
        self._last_of: dict[int, float] = {}  # when each answer had its newest token
        self._gaps_ms: list[float] = []
        self._preempted_s: list[float] = []
        self._num_steps = 0
        self._newest_step = 0
        self._sum_batch = 0
        self._timings = types_pb2.PhaseTimings()

    def admitted(self, now: float) -> None:
        self._admitted_s = now

    def transferred(self, outcome: FetchOutcome) -> None:
        self._transfer(
            outcome.transport,
            outcome.began_s,
            outcome.sealed_s,
            outcome.ended_s,
            num_blocks=outcome.num_blocks,
            num_bytes=outcome.num_bytes,
            num_not_moved=outcome.num_not_moved,
        )

    def adopted(self, started_s: float, num_blocks: int) -> None:
        now = self._host.clock.now()
        self._transfer(types_pb2.TRANSPORT_LOCAL, started_s, now, now, num_blocks=num_blocks, num_bytes=0)

    def token(self, now: float, report: StepReport, index: int = 0) -> None:
        """Notes a token of the answer with that index."""
        if self._num_steps == 0:
            self._first_step_s = report.started_s
            self._first_step_ended_s = now
        if index in self._last_of:
            self._gaps_ms.append((now - self._last_of[index]) * 1000)
        self._last_of[index] = now
        if report.step_number != self._newest_step:  # one step may bring several tokens
            self._newest_step = report.step_number
            self._num_steps += 1
            self._sum_batch += max(1, report.num_decodes)
        self._last_token_s = now

    def preempted(self, now: float) -> None:
        self._preempted_s.append(now)

    def timings(self) -> types_pb2.PhaseTimings:
        """Returns the timings known so far, in milliseconds."""
        if self._num_steps:
            if self._ready_s is not None:
                self._timings.decode_wait_ms = (self._first_step_s - self._ready_s) * 1000
            elif self._admitted_s is not None:
                self._timings.prefill_wait_ms = (self._admitted_s - self._arrival_s) * 1000
                self._timings.prefill_compute_ms = (self._first_step_ended_s - self._admitted_s) * 1000
            self._timings.decode_run_ms = (self._last_token_s - self._run_start_s) * 1000
        return self._timings

    def close(self) -> None:
        if not self._num_steps:
            return
        common: dict[str, Value] = {Attr.LEG: self._command.leg, Attr.WORKER: self._host.worker_id}
        if self._ready_s is not None:
            self._span(Span.DECODE_WAIT, self._ready_s, self._first_step_s, common)
        elif self._admitted_s is not None:
            self._span(Span.PREFILL_WAIT, self._arrival_s, self._admitted_s, common)
            prompt: dict[str, Value] = {Attr.NUM_TOKENS: len(self._command.token_ids)}
            self._span(Span.PREFILL_COMPUTE, self._admitted_s, self._first_step_ended_s, {**common, **prompt})
        gaps = sorted(self._gaps_ms)
        steps: dict[str, Value | None] = {
            Attr.NUM_STEPS: self._num_steps,
            Attr.MEAN_BATCH_SIZE: self._sum_batch / self._num_steps,
            Attr.FIRST_STEP_MS: (self._first_step_ended_s - self._first_step_s) * 1000,
            Attr.INTER_TOKEN_P50_MS: _quantile(gaps, 0.50),
            Attr.INTER_TOKEN_P99_MS: _quantile(gaps, 0.99),
            Attr.INTER_TOKEN_MAX_MS: gaps[-1] if gaps else None,
            Attr.NUM_PREEMPTIONS: len(self._preempted_s) or None,
        }
        events: list[tuple[str, float, Attributes]] = [(Event.PREEMPTED, at_s, {}) for at_s in self._preempted_s]
        self._span(Span.DECODE_RUN, self._run_start_s, self._last_token_s, {**common, **steps}, events)

    @property
    def _run_start_s(self) -> float:
        """Returns when the decode run began: after the first token if the prompt was computed here, else at the first
        step."""
        return self._first_step_s if self._ready_s is not None else self._first_step_ended_s

    def _transfer(
        self,
        transport: types_pb2.Transport,
        start_s: float,
        sealed_s: float,
        end_s: float,
        *,
        num_blocks: int,
        num_bytes: int,
        num_not_moved: int = 0,
    ) -> None:
        self._ready_s = end_s
        overlapped_ms, exposed_ms = (sealed_s - start_s) * 1000, (end_s - sealed_s) * 1000
        timings = self._timings
        timings.transfer_ms = overlapped_ms + exposed_ms
        timings.transfer_overlapped_ms, timings.transfer_exposed_ms = overlapped_ms, exposed_ms
        timings.transfer_bytes, timings.transfer_blocks, timings.transport = num_bytes, num_blocks, transport
        name = enum_word(types_pb2.Transport.DESCRIPTOR, transport)
        self._host.tally.transferred(name, num_bytes, end_s - start_s, exposed_ms / 1000)
        self._host.tally.blocks_not_moved += num_not_moved
        attributes: dict[str, Value | None] = {
            Attr.LEG: self._command.leg,
            Attr.WORKER: self._host.worker_id,
            Attr.LEASE_ID: self._command.handoff.lease_id.hex(),
            Attr.TRANSFER_TRANSPORT: name,
            Attr.TRANSFER_BYTES: num_bytes,
            Attr.TRANSFER_BLOCKS: num_blocks,
            Attr.TRANSFER_BLOCKS_NOT_MOVED: num_not_moved,
            Attr.TRANSFER_OVERLAPPED_MS: overlapped_ms,
            Attr.TRANSFER_EXPOSED_MS: exposed_ms,
        }
        self._host.span(self._command, Span.KV_TRANSFER, start_s, end_s, attributes, [(Event.SEALED, sealed_s, {})])

    def _span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        events: Seq[tuple[str, float, Attributes]] = (),
    ) -> None:
        self._host.span(self._command, name, start_s, end_s, attributes, events)


def _quantile(ordered: list[float], share: float) -> float | None:
    """Returns the quantile by nearest rank; None if there are no values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
