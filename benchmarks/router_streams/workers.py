"""Runs workers without an engine, in one process: `python -m benchmarks.router_streams.workers` (see `measure.py`).

To routers they are prefill and decode workers like any other: they register, their sessions answer commands, prompts
run one after another at a cost for each token, handoffs release their leases, and every decode step sends its
sequences' tokens in one message with a snapshot of the load. What they lack is a model: token `p` of every output is
word `p` of a text that goes round. When each token was sent is kept, and written to a file at the end.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import random
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.clock import MonotonicClock
from services.core.cluster_token import cluster_token
from services.core.ids import new_incarnation
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from services.worker.session import WORKER_SERVICE

HEARTBEAT_S = 0.5
BLOCK_SIZE = 16
_CLOCK = MonotonicClock()


@dataclasses.dataclass(frozen=True)
class Settings:
    """Says what to run. Times are what the missing engine would take, in milliseconds."""

    model: str
    """The name that routers serve it by."""
    routers: list[str]
    """Their control addresses."""
    words: list[int]
    """Token ids of the text that all outputs have."""
    num_prefill: int
    num_decode: int
    num_blocks: int = 65536
    """Blocks of each worker's pool."""
    prefill_token_ms: float = 0.0
    step_ms: float = 200.0
    step_sequence_ms: float = 0.0
    """What each further sequence adds to a step."""


@dataclasses.dataclass(eq=False)
class _Lease:
    worker: _Worker
    session: _Session
    leg: int
    num_tokens: int
    is_sealed: bool = False
    importer: Callable[[], None] | None = None
    """Imports it, once it is sealed: a decode worker may be found while the prompt still runs."""


@dataclasses.dataclass
class _Sequence:
    session: _Session
    leg: int
    request_id: str
    position: int
    max_tokens: int
    num_tokens: int


class _Worker:
    def __init__(
        self, worker_id: str, role: types_pb2.WorkerRole, settings: Settings, sent: _Sent, board: dict[bytes, _Lease]
    ) -> None:
        """`board` has all leases of the cluster."""
        self.worker_id, self.incarnation = worker_id, new_incarnation()
        self._role, self._settings, self._board = role, settings, board
        self.sent = sent
        self.running: dict[tuple[_Session, int], _Sequence] = {}
        self.prompts: deque[tuple[_Session, worker_pb2.PrefillCommand]] = deque()
        self.leases: dict[bytes, _Lease] = {}
        self.came = asyncio.Event()
        self._num_snapshots = self._num_steps = self._num_prompt_tokens = 0

    def description(self, address: str) -> control_pb2.WorkerDescription:
        return control_pb2.WorkerDescription(
            worker_id=self.worker_id,
            roles=[self._role],
            address=address,
            incarnation=self.incarnation,
            pid=1,
            layout=types_pb2.KVLayout(
                model_id=self._settings.model, weights_digest="x", dtype="float32", num_layers=1, block_size=BLOCK_SIZE
            ),
            fingerprint=types_pb2.Fingerprint(kv="5c" * 16, numerics="none"),
            num_blocks=self._settings.num_blocks,
            max_model_len=8192,
            max_num_seqs=1024,
            host_id="here",
        )

    def load(self) -> types_pb2.LoadSnapshot:
        self._num_snapshots += 1
        active = sum(_blocks(sequence.num_tokens) for sequence in self.running.values())
        leased = sum(_blocks(lease.num_tokens) for lease in self.leases.values())
        settings, queued = self._settings, sum(len(command.token_ids) for _, command in self.prompts)
        return types_pb2.LoadSnapshot(
            sequence_number=self._num_snapshots,
            blocks_active=active,
            blocks_leased=leased,
            blocks_free=max(0, self._settings.num_blocks - active - leased),
            num_running=len(self.running),
            num_waiting=len(self.prompts),
            queued_prefill_tokens=queued,
            num_leases=len(self.leases),
            ms_per_prefill_token=settings.prefill_token_ms,
            ms_per_decode_step=settings.step_ms,
            ms_per_decode_sequence=settings.step_sequence_ms,
            tokens_per_prefill_step=512,
            prefix_tokens_queried=self._num_prompt_tokens,
        )

    async def run_prompts(self) -> None:
        """Runs prompts one after another, as long as each would take."""
        while True:
            while not self.prompts:
                self.came.clear()
                await self.came.wait()
            session, command = self.prompts[0]
            lease_id = random.randbytes(16)
            started = worker_pb2.PrefillStarted(leg=command.leg, lease_id=lease_id)
            started.source.address = self.worker_id  # nobody dials it: the importing worker is in this process
            lease = _Lease(self, session, command.leg, len(command.token_ids))
            self.leases[lease_id] = self._board[lease_id] = lease
            session.say([worker_pb2.LegEvent(started=started)])
            await asyncio.sleep(len(command.token_ids) * self._settings.prefill_token_ms / 1000)
            self.prompts.popleft()
            self._num_steps += 1
            self._num_prompt_tokens += len(command.token_ids)
            if lease_id not in self._board:
                continue  # it was given up
            tokens = types_pb2.SequenceTokens(
                leg=command.leg, position=command.output_base, token_ids=[self.sent.word(command.output_base)]
            )
            self.sent.note(command.request_id, command.output_base, _CLOCK.now())
            session.say([worker_pb2.LegEvent(tokens=tokens)])
            lease.is_sealed = True
            if lease.importer is not None:
                lease.importer()

    async def run_steps(self, start_s: float) -> None:
        """Takes one decode step after another; an idle worker waits. The first begins in `start_s`, so that workers
        do not go in step."""
        await asyncio.sleep(start_s)
        due_s = _CLOCK.now()
        while True:
            while not self.running:
                self.came.clear()
                await self.came.wait()
                due_s = _CLOCK.now()
            settings = self._settings
            due_s += (settings.step_ms + (len(self.running) - 1) * settings.step_sequence_ms) / 1000
            await asyncio.sleep(due_s - _CLOCK.now())
            self._num_steps += 1
            self._step()

    def _step(self) -> None:
        events: dict[_Session, list[worker_pb2.LegEvent]] = {}
        sequences = list(self.running.values())
        for sequence in sequences:
            event = worker_pb2.LegEvent()
            tokens = event.tokens
            tokens.leg, tokens.position = sequence.leg, sequence.position
            tokens.token_ids.append(self.sent.word(sequence.position))
            sequence.position += 1
            sequence.num_tokens += 1
            if sequence.position >= sequence.max_tokens:
                tokens.finish.reason = types_pb2.FINISH_REASON_LENGTH
                sequence.session.end(sequence.leg)
            events.setdefault(sequence.session, []).append(event)
        now = _CLOCK.now()
        for sequence in sequences:
            self.sent.note(sequence.request_id, sequence.position - 1, now)
        for session, each in events.items():
            session.say(each)


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class _Sent:
    """Keeps when each request's tokens were sent, in seconds of the monotonic clock."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self.times_s: dict[str, array.array[float]] = {}

    def word(self, position: int) -> int:
        return self._words[position % len(self._words)]

    def note(self, request_id: str, position: int, now: float) -> None:
        """Notes that the token is sent. Of one that two workers send, the first counts: so it is with handoffs."""
        times_s = self.times_s.setdefault(request_id, array.array("d"))
        if position == len(times_s):
            times_s.append(now)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({request_id: list(times) for request_id, times in self.times_s.items()}))


class _Session:
    """Runs one router's session with one worker."""

    def __init__(self, worker: _Worker, address: str, board: dict[bytes, _Lease]) -> None:
        self.legs: set[int] = set()
        self._worker, self._address, self._board = worker, address, board
        self._outgoing: asyncio.Queue[worker_pb2.SessionResponse] = asyncio.Queue()
        self._newest_leg = 0

    def say(self, events: list[worker_pb2.LegEvent], *, heartbeat: bool = False) -> None:
        message = worker_pb2.SessionResponse(events=events, load=self._worker.load())
        if heartbeat:
            message.live_legs.newest_leg = self._newest_leg
            message.live_legs.legs.extend(self.legs)
            message.worker.CopyFrom(self._worker.description(self._address))
        self._outgoing.put_nowait(message)

    def end(self, leg: int) -> None:
        self.legs.discard(leg)
        self._worker.running.pop((self, leg), None)

    def close(self) -> None:
        for leg in list(self.legs):
            self._give_up(leg)

    async def write(self, context: Any) -> None:
        """Sends what is said, with a heartbeat in each interval."""
        while True:
            self.say([], heartbeat=True)
            due_s = _CLOCK.now() + HEARTBEAT_S
            while (left_s := due_s - _CLOCK.now()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await context.write(await self._outgoing.get())

    async def read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "prefill":
                    self._newest_leg = request.prefill.leg
                    self.legs.add(request.prefill.leg)
                    self._worker.prompts.append((self, request.prefill))
                    self._worker.came.set()
                case "decode":
                    self._newest_leg = request.decode.leg
                    self._decode(request.decode)
                case "cancel":
                    self._give_up(request.cancel.leg)

    def _decode(self, command: worker_pb2.DecodeCommand) -> None:
        leg, event = command.leg, worker_pb2.LegEvent
        lease = self._board.get(command.handoff.lease_id)
        if command.HasField("handoff") and lease is None:
            self.say([event(import_failed=worker_pb2.ImportFailed(leg=leg, lease_alive=False))])
            return
        self.legs.add(leg)
        self.say([event(admitted=worker_pb2.DecodeAdmitted(leg=leg))])
        if lease is None:  # it runs here as a whole
            self._run(command)
            return
        lease.importer = functools.partial(self._import, command, lease)
        if lease.is_sealed:
            lease.importer()

    def _import(self, command: worker_pb2.DecodeCommand, lease: _Lease) -> None:
        if command.leg in self.legs:
            self.say([worker_pb2.LegEvent(ready=worker_pb2.ImportReady(leg=command.leg))])
            lease.session.release(command.handoff.lease_id)
            self._run(command)

    def _run(self, command: worker_pb2.DecodeCommand) -> None:
        self._worker.running[self, command.leg] = _Sequence(
            self,
            command.leg,
            command.request_id,
            command.output_base,
            command.stopping.max_tokens,
            len(command.token_ids),
        )
        self._worker.came.set()

    def release(self, lease_id: bytes) -> None:
        """Ends a lease that one of the session's prompts left, and says so to the router."""
        lease = self._board.pop(lease_id)
        del lease.worker.leases[lease_id]
        self.legs.discard(lease.leg)
        ended = worker_pb2.LeaseEnded(leg=lease.leg, reason=worker_pb2.LEASE_END_REASON_RELEASED)
        self.say([worker_pb2.LegEvent(lease_ended=ended)])

    def _give_up(self, leg: int) -> None:
        for lease_id, lease in list(self._worker.leases.items()):
            if lease.session is self and lease.leg == leg:
                self.release(lease_id)
        self.end(leg)


class _Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves all workers at one address: a session says by the incarnation which one it is for."""

    def __init__(self, workers: Sequence[_Worker], board: dict[bytes, _Lease]) -> None:
        self.address = ""
        self._workers = {worker.incarnation: worker for worker in workers}
        self._board = board

    async def Session(self, request_iterator: Any, context: Any) -> None:
        requests = aiter(request_iterator)
        worker = self._workers[(await anext(requests)).hello.worker_incarnation]
        session = _Session(worker, self.address, self._board)
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(session.write(context))
                await session.read(requests)
                writing.cancel()
        finally:
            session.close()


async def _run(settings: Settings, times: Path) -> None:
    """Runs the workers until SIGTERM, then writes when each request's tokens were sent."""
    stopping, sent, board = asyncio.Event(), _Sent(settings.words), dict[bytes, _Lease]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    roles = [("prefill", types_pb2.WORKER_ROLE_PREFILL, n) for n in range(settings.num_prefill)]
    roles += [("decode", types_pb2.WORKER_ROLE_DECODE, n) for n in range(settings.num_decode)]
    workers = [_Worker(f"{name}-{number}", role, settings, sent, board) for name, role, number in roles]
    servicer, token = _Servicer(workers, board), cluster_token()
    server = GrpcServer(token=token)
    server.add(WORKER_SERVICE, worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
    await server.start()
    servicer.address = server.address
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, worker in enumerate(workers):
            start_s = settings.step_ms / 1000 * number / len(workers)
            tasks += [group.create_task(worker.run_prompts()), group.create_task(worker.run_steps(start_s))]
            tasks += [group.create_task(_register(worker, server.address, each, token)) for each in settings.routers]
        await stopping.wait()
        for task in tasks:
            task.cancel()
    await asyncio.sleep(1.0)  # until all that was said is written
    sent.write(times)
    await server.stop()


async def _register(worker: _Worker, address: str, router: str, token: str) -> None:
    request = control_pb2.RegisterRequest(worker=worker.description(address))
    async with dial(router, token=token) as channel:
        while True:
            answer = await control_pb2_grpc.RegistryServiceStub(channel).Register(request, wait_for_ready=True)
            await asyncio.sleep(answer.interval_ms / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="as JSON")
    parser.add_argument("--times", type=Path, required=True, help="the file for when each token was sent")
    arguments = parser.parse_args()
    gc.disable()
    uvloop.run(_run(Settings(**json.loads(arguments.settings)), arguments.times))


if __name__ == "__main__":
    main()
