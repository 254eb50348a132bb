"""A worker without an engine: real servers and sessions, tokens from a script.

It answers every request with the same output, token `p` of it at output position `p`, so that a replay continues it. A
test may hold phases back, refuse, fail, or cut the sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from baton.v1 import (
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from services.core.errors import BatonError
from services.core.ids import new_incarnation
from services.rpc.serving import GrpcServer
from services.rpc.status import to_status

MODEL_ID = "tiny"
EOS_TOKEN_ID = 2
LAYOUT = types_pb2.KVLayout(model_id=MODEL_ID, weights_digest="x", dtype="float32", num_layers=1, block_size=16)
_ROLES = {
    "prefill": types_pb2.WORKER_ROLE_PREFILL,
    "decode": types_pb2.WORKER_ROLE_DECODE,
    "mixed": types_pb2.WORKER_ROLE_MIXED,
}


class ScriptedWorker(prefill_pb2_grpc.PrefillServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        role: str,
        output: Sequence[int],
        leases: dict[bytes, asyncio.Event] | None = None,
        *,
        worker_id: str = "",
        num_blocks: int = 32,
    ) -> None:
        """`leases`: those of the whole cluster; each event says that the lease was released."""
        self.worker_id = worker_id or role
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
        self.leaves = True
        """When told to, and nothing runs any more."""
        self.told_to_leave = False
        self.leaving: asyncio.Task[None] | None = None
        self.seen = asyncio.Event()
        """Pulsed with every message received."""
        self._sessions: set[_Session] = set()
        self._num_snapshots = 0
        self._server = GrpcServer()

    @property
    def num_legs(self) -> int:
        return sum(len(session.legs) for session in self._sessions)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def start(self) -> None:
        add = self._server.add
        add("baton.v1.PrefillService", prefill_pb2_grpc.add_PrefillServiceServicer_to_server, self)
        add("baton.v1.DecodeService", decode_pb2_grpc.add_DecodeServiceServicer_to_server, self.decode_half())
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    def decode_half(self) -> decode_pb2_grpc.DecodeServiceServicer:
        """Both services have an RPC called Session."""
        half = decode_pb2_grpc.DecodeServiceServicer()
        half.Session = self.DecodeSession  # type: ignore[method-assign]
        return half

    def description(self) -> control_pb2.WorkerDescription:
        return control_pb2.WorkerDescription(
            worker_id=self.worker_id,
            role=_ROLES[self.role],
            address=self._server.address,
            incarnation=self.incarnation,
            pid=1,
            layout=LAYOUT,
            num_blocks=self.num_blocks,
            max_model_len=self.num_blocks * LAYOUT.block_size,
            max_num_seqs=8,
            host_id="here",
        )

    async def register(self, channel: grpc.aio.Channel) -> control_pb2.RegisterResponse:
        stub = control_pb2_grpc.RegistryServiceStub(channel)
        return await stub.Register(control_pb2.RegisterRequest(worker=self.description()))

    def cut(self, *, orderly: bool = False, kind: str = "") -> None:
        """Ends all sessions at once, or those of a kind: as a crash, or with status OK."""
        for session in list(self._sessions):
            if kind in ("", session.kind):
                session.broken = not orderly
                session.outgoing.put_nowait(None)

    async def leave(self) -> None:
        await self.until(lambda: not self.num_legs)
        self.cut(orderly=True)

    def say(self, message: Any) -> None:
        """An event, or a whole response, in the sessions it fits."""
        kind = message.DESCRIPTOR.name.partition("Service")[0].removesuffix("Event")
        for session in self._sessions:
            if session.kind == kind:
                session.outgoing.put_nowait(message)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.seen.clear()
                await self.seen.wait()

    # The two services

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._serve(aiter(request_iterator), prefill_pb2.PrefillServiceSessionResponse):
            yield response

    async def DecodeSession(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self._serve(aiter(request_iterator), decode_pb2.DecodeServiceSessionResponse):
            yield response

    async def _serve(self, requests: AsyncIterator[Any], response: Any) -> AsyncIterator[Any]:
        hello = (await anext(requests)).hello
        assert hello.worker_incarnation == self.incarnation
        session = _Session(self, response.DESCRIPTOR.name.partition("Service")[0])
        self._sessions.add(session)
        reader = asyncio.create_task(session.read(requests))
        try:
            while True:
                if self.heartbeats or session.legs:
                    yield response(load=self._load())
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

    def _load(self) -> types_pb2.LoadSnapshot:
        self._num_snapshots += 1
        return types_pb2.LoadSnapshot(sequence_number=self._num_snapshots, blocks_free=self.num_blocks)


class _Session:
    def __init__(self, worker: ScriptedWorker, kind: str) -> None:
        """`kind`: Prefill or Decode."""
        self.kind = kind
        self.legs: dict[int, asyncio.Task[None]] = {}
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.broken = False
        self._worker = worker

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
            case "heartbeat" if request.DESCRIPTOR.full_name.startswith("baton.v1.Prefill"):
                worker.held_leases = list(request.heartbeat.held_leases)

    def _start(self, leg: int, work: Any) -> None:
        task = self.legs[leg] = asyncio.create_task(work)

        def over(_: object) -> None:
            self.legs.pop(leg, None)
            self._worker.seen.set()

        task.add_done_callback(over)

    async def _prefill(self, command: prefill_pb2.PrefillCommand) -> None:
        worker, leg = self._worker, command.leg
        await worker.prefill_gate.wait()
        if worker.failure is not None:
            failure, worker.failure = worker.failure, None
            failed = types_pb2.LegFailed(leg=leg, status=to_status(failure))
            self.outgoing.put_nowait(prefill_pb2.PrefillEvent(failed=failed))
            return
        lease_id = leg.to_bytes(16, "big")
        released = worker.leases[lease_id] = asyncio.Event()
        started = prefill_pb2.PrefillStarted(leg=leg, lease_id=lease_id, cached_tokens=3)
        started.source.layout.CopyFrom(LAYOUT)
        self.outgoing.put_nowait(prefill_pb2.PrefillEvent(started=started))
        tokens = self._tokens(command, command.output_base)
        tokens.timings.prefill_compute_ms = 7.0
        self.outgoing.put_nowait(prefill_pb2.PrefillEvent(tokens=tokens))
        if not tokens.HasField("finish"):
            await released.wait()
            reason = prefill_pb2.LEASE_END_REASON_RELEASED
            ended = prefill_pb2.LeaseEnded(leg=leg, lease_id=lease_id, reason=reason)
            self.outgoing.put_nowait(prefill_pb2.PrefillEvent(lease_ended=ended))

    async def _decode(self, command: decode_pb2.DecodeCommand) -> None:
        worker, leg = self._worker, command.leg
        if worker.num_refusals:
            worker.num_refusals -= 1
            self._emit(refused=decode_pb2.DecodeRefused(leg=leg, needed_blocks=1, missing_blocks=1))
            return
        self._emit(admitted=decode_pb2.DecodeAdmitted(leg=leg))
        if command.HasField("handoff"):
            worker.leases[command.handoff.lease_id].set()
            self._emit(ready=decode_pb2.ImportReady(leg=leg))
        position = command.output_base
        while True:
            tokens = self._tokens(command, position)
            if tokens.HasField("finish"):
                tokens.finish.timings.decode_run_ms = 5.0
            self._emit(tokens=tokens)
            if tokens.HasField("finish"):
                return
            await worker.decode_gate.wait()
            position += 1

    def _emit(self, **event: Any) -> None:
        self.outgoing.put_nowait(decode_pb2.DecodeEvent(**event))

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
