"""Provides a worker without an engine: real servers and sessions, tokens from a script.

It answers every request with the same output, token `p` of it at output position `p`, so that a replay continues it. A
test may hold phases back, refuse, fail, or cut the sessions.
"""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.errors import BatonError, UnsupportedModel
from services.core.ids import new_incarnation
from services.rpc.serving import GrpcServer
from services.rpc.status import to_status
from services.worker.model_text import give_model_text
from services.worker.session import WORKER_SERVICE
from tests.support.patience import HANG_S
from tests.support.text_model import byte_tokenizer
from tests.support.trusted import CLUSTER_TOKEN

MODEL_ID = "tiny"
TOKENIZER = byte_tokenizer()
TEXT = "the baton is passed 🙂."
OUTPUT = list(TOKENIZER.encode(TEXT, add_special_tokens=False).ids)
"""What scripted workers of `cluster.py` answer."""
EOS_TOKEN_ID = 2
_LAYOUT: dict[str, Any] = {"weights_digest": "x", "dtype": "float32", "num_layers": 1, "block_size": 16}
LAYOUT = types_pb2.KVLayout(model_id=MODEL_ID, **_LAYOUT)
_ROLES = {
    "prefill": [types_pb2.WORKER_ROLE_PREFILL],
    "decode": [types_pb2.WORKER_ROLE_DECODE],
    "mixed": [types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE],
}


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        role: str,
        output: Sequence[int],
        leases: dict[bytes, asyncio.Event] | None = None,
        *,
        worker_id: str = "",
        num_blocks: int = 32,
        model_id: str = MODEL_ID,
        text: pathlib.Path | None = None,
    ) -> None:
        """`leases`: those of the whole cluster; each event says that the lease was released. `text`: where the text
        side of its model is, for routers that do not know it."""
        self.worker_id = worker_id or role
        self.model_id = model_id
        self.text = text
        self.num_texts_given = 0
        self.text_gate = asyncio.Event()
        """The text is given while it is set."""
        self.text_gate.set()
        self.role = role
        self.output = [*output, EOS_TOKEN_ID]
        self.leases = {} if leases is None else leases
        self.num_blocks = num_blocks
        self.incarnation = new_incarnation()
        self.commands: list[Any] = []
        self.cancelled: list[int] = []
        self.held_leases: list[bytes] = []
        self.prefill_gate = asyncio.Event()
        """Prompts run while it is set."""
        self.decode_gate = asyncio.Event()
        """Tokens after the first come while it is set."""
        self.prefill_gate.set()
        self.decode_gate.set()
        self.heartbeats = True
        self.num_refusals = 0
        """How many handoffs to refuse next."""
        self.failure: BatonError | None = None
        """Fails the next prompt."""
        self.finish_timings = types_pb2.PhaseTimings(decode_run_ms=5.0)
        """What it says to have measured."""
        self.num_running = 0
        self.num_tokens = 0
        """Tokens that it says to have computed."""
        """Others' sequences, as its load tells."""
        self.ms_per_decode_step = 0.0
        """What it says to have measured, in ten steps more with each snapshot; 0 for nothing."""
        self.num_to_sit_on = 0
        """How many commands to accept next and never begin: they are listed as live."""
        self.num_to_lose = 0
        """How many commands to accept next and lose without a word: they are not listed."""
        self.num_routers: int | None = None
        """How many routers it says it has; None to say nothing."""
        self.verdicts: dict[int, int] = {}
        """Those of which it tells, by incarnation."""
        self.verdicts_heard: dict[int, int] = {}
        self.phantom_legs: list[int] = []
        """Listed, although no router ever sent them."""
        self.claim: control_pb2.WorkerDescription | None = None
        """What it says of itself in its sessions, if that is not the truth."""
        self.leaves = True
        """When told to, and nothing runs any more."""
        self.told_to_leave = False
        self.leaving: asyncio.Task[None] | None = None
        self.seen = asyncio.Event()
        """Pulsed with every message received."""
        self._sessions: set[_Session] = set()
        self._num_snapshots = 0
        self._server = GrpcServer(token=CLUSTER_TOKEN)

    @property
    def num_legs(self) -> int:
        return sum(len(session.legs) for session in self._sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def start(self) -> None:
        self._server.add(WORKER_SERVICE, worker_pb2_grpc.add_WorkerServiceServicer_to_server, self)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def description(self) -> control_pb2.WorkerDescription:
        return control_pb2.WorkerDescription(
            worker_id=self.worker_id,
            roles=_ROLES[self.role],
            address=self._server.address,
            incarnation=self.incarnation,
            pid=1,
            layout=types_pb2.KVLayout(**{**_LAYOUT, "model_id": self.model_id}),
            fingerprint=types_pb2.Fingerprint(kv="5c" * 16, numerics="none"),
            num_blocks=self.num_blocks,
            max_model_len=self.num_blocks * LAYOUT.block_size,
            max_num_seqs=8,
            host_id="here",
        )

    def says_it_is(self) -> control_pb2.WorkerDescription:
        """Returns what it says of itself in its sessions: the truth, unless a test has given it another description."""
        return self.description() if self.claim is None else self.claim

    async def register(self, channel: grpc.aio.Channel) -> control_pb2.RegisterResponse:
        stub = control_pb2_grpc.RegistryServiceStub(channel)
        return await stub.Register(control_pb2.RegisterRequest(worker=self.description()))

    def cut(self, *, orderly: bool = False) -> None:
        """Ends all sessions, after what was said in them: as a crash, or with status OK."""
        for session in list(self._sessions):
            session.broken = not orderly
            session.outgoing.put_nowait(None)

    async def leave(self) -> None:
        await self.until(lambda: not self.num_legs)
        self.cut(orderly=True)

    def say(self, message: Any) -> None:
        """Sends an event, or a whole response, in every session."""
        for session in self._sessions:
            session.outgoing.put_nowait(message)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self.seen.clear()
                await self.seen.wait()

    async def GetModelText(self, request: Any, context: Any) -> None:
        self.num_texts_given += 1
        await self.text_gate.wait()
        if self.text is None:
            raise UnsupportedModel("it has no text")
        await give_model_text(self.text, context.write)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
        requests, response = aiter(request_iterator), worker_pb2.SessionResponse
        hello = (await anext(requests)).hello
        assert hello.worker_incarnation == self.incarnation
        session = _Session(self)
        self._sessions.add(session)
        reader = asyncio.create_task(session.read(requests))
        try:
            while True:
                if self.heartbeats or session.legs:
                    yield response(
                        load=self._load(),
                        live_legs=session.live_legs(),
                        worker=self.says_it_is(),
                        num_routers=self.num_routers,
                        verdicts=[
                            worker_pb2.Verdict(incarnation=each, number=number)
                            for each, number in self.verdicts.items()
                        ],
                    )
                try:
                    async with asyncio.timeout(0.05):
                        event = await session.outgoing.get()
                except TimeoutError:
                    continue
                if event is None:
                    break
                yield event if isinstance(event, response) else response(events=[event], load=self._load())
            if session.broken:
                raise ConnectionError("cut by the test")
        finally:
            reader.cancel()
            session.end()
            self._sessions.discard(session)
            self.seen.set()

    def next_snapshot(self) -> int:
        self._num_snapshots += 1
        return self._num_snapshots

    def _load(self) -> types_pb2.LoadSnapshot:
        number = self.next_snapshot()
        return types_pb2.LoadSnapshot(
            sequence_number=number,
            blocks_free=self.num_blocks,
            num_running=self.num_running,
            ms_per_decode_step=self.ms_per_decode_step,
            num_tokens=self.num_tokens,
            decode_step=types_pb2.StepAverage(
                ms=self.ms_per_decode_step, tokens=1, attended_tokens=100, num_steps=10 * number
            ),
        )


class _Session:
    def __init__(self, worker: ScriptedWorker) -> None:
        self.legs: dict[int, asyncio.Task[None]] = {}
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.broken = False
        self.newest_leg = 0
        self._worker = worker

    def live_legs(self) -> worker_pb2.LiveLegs:
        """Returns the live legs. What has been said of any leg was put into `outgoing` before: only when that is empty
        is this true."""
        if not self.outgoing.empty():
            return worker_pb2.LiveLegs()
        return worker_pb2.LiveLegs(newest_leg=self.newest_leg, legs=[*self.legs, *self._worker.phantom_legs])

    async def read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self._accept(request)
            self._worker.seen.set()

    def end(self) -> None:
        for task in self.legs.values():
            task.cancel()
        self.legs.clear()

    def _accept(self, request: Any) -> None:
        worker = self._worker
        match request.WhichOneof("message"):
            case "prefill":
                worker.commands.append(request.prefill)
                self._start(request.prefill.leg, self._prefill(request.prefill))
            case "decode":
                worker.commands.append(request.decode)
                self._start(request.decode.leg, self._decode(request.decode))
            case "cancel":
                worker.cancelled.append(request.cancel.leg)
                if task := self.legs.pop(request.cancel.leg, None):
                    task.cancel()
            case "leave":
                worker.told_to_leave = True
                if worker.leaves:
                    worker.leaving = asyncio.create_task(worker.leave())
            case "heartbeat":
                worker.held_leases = list(request.heartbeat.held_leases)
                worker.verdicts_heard = {each.incarnation: each.number for each in request.heartbeat.verdicts}

    def _start(self, leg: int, work: Any) -> None:
        self.newest_leg = leg
        worker = self._worker
        if worker.num_to_lose:
            worker.num_to_lose -= 1
            work.close()
            return
        if worker.num_to_sit_on:
            worker.num_to_sit_on -= 1
            work.close()
            work = asyncio.Event().wait()
        task = self.legs[leg] = asyncio.create_task(work)

        def over(_: object) -> None:
            self.legs.pop(leg, None)
            self._worker.seen.set()

        task.add_done_callback(over)

    async def _prefill(self, command: worker_pb2.PrefillCommand) -> None:
        worker, leg = self._worker, command.leg
        await worker.prefill_gate.wait()
        if worker.failure is not None:
            failure, worker.failure = worker.failure, None
            failed = worker_pb2.LegFailed(leg=leg, status=to_status(failure))
            self._emit(failed=failed)
            return
        lease_id = leg.to_bytes(16, "big")
        released = worker.leases[lease_id] = asyncio.Event()
        started = worker_pb2.PrefillStarted(leg=leg, lease_id=lease_id, cached_tokens=3)
        started.source.layout.CopyFrom(LAYOUT)
        self._emit(started=started)
        tokens = self._tokens(command, command.output_base)
        tokens.timings.prefill_compute_ms = 7.0
        self._emit(tokens=tokens)
        if not tokens.HasField("finish"):
            await released.wait()
            reason = worker_pb2.LEASE_END_REASON_RELEASED
            ended = worker_pb2.LeaseEnded(leg=leg, reason=reason)
            self._emit(lease_ended=ended)

    async def _decode(self, command: worker_pb2.DecodeCommand) -> None:
        worker, leg = self._worker, command.leg
        if worker.num_refusals:
            worker.num_refusals -= 1
            self._emit(refused=worker_pb2.DecodeRefused(leg=leg, needed_blocks=1, missing_blocks=1))
            return
        self._emit(admitted=worker_pb2.DecodeAdmitted(leg=leg))
        if command.HasField("handoff"):
            worker.leases[command.handoff.lease_id].set()
            self._emit(ready=worker_pb2.ImportReady(leg=leg))
        position = command.output_base
        while True:
            tokens = self._tokens(command, position)
            if tokens.HasField("finish"):
                tokens.finish.timings.CopyFrom(worker.finish_timings)
            self._emit(tokens=tokens)
            if tokens.HasField("finish"):
                return
            await worker.decode_gate.wait()
            position += 1

    def _emit(self, **event: Any) -> None:
        self.outgoing.put_nowait(worker_pb2.LegEvent(**event))

    def _tokens(self, command: Any, position: int) -> types_pb2.SequenceTokens:
        token = self._worker.output[position]
        tokens = types_pb2.SequenceTokens(leg=command.leg, position=position, token_ids=[token])
        if command.HasField("logprobs"):
            tokens.logprobs.add(logprob=-1.0)
        if token == EOS_TOKEN_ID:
            tokens.finish.reason = types_pb2.FINISH_REASON_STOP
            tokens.finish.stop_token_id = token
        elif position + 1 == command.stopping.max_tokens:
            tokens.finish.reason = types_pb2.FINISH_REASON_LENGTH
        return tokens
