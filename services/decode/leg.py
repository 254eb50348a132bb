"""Carries out DecodeCommands, each from its arrival to its last token.

Owns: the leg's place in the session, in the hub and in the engine. Never: how KV is taken in (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import BatonError, DeadlineExceeded, LayoutMismatch, unforeseen
from services.decode.import_intake import Held, ImportIntake
from services.decode.record import DecodeRecord
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
from services.rpc.logging import log_ids
from services.worker.commands import prompt_tokens_of, tokens_of
from services.worker.handoffs import FirstTokens, HandoffLeg, Refused
from services.worker.host import WorkerHost
from services.worker.session import RouterSession


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
