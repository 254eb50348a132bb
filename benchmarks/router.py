"""Measures what the coordinator costs its event loop: one input at a time, with the placement that it causes. No model,
no I/O.

The clusters are as `baton router` configures them, canaries included (all have passed), but that only the last figures
share prefixes. Times are those of the
processor, so that other processes disturb them less; a plain loop of Python, timed in the same run, says how fast the
machine is.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

from benchmarks.figure import Figure
from services.core.hashing import PromptHashes, block_hashes, short_hashes
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    DecodeAdmitted,
    FinishReason,
    ImportReady,
    PrefillStarted,
    RequestSpec,
    SendLeg,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Fingerprint, Load, PolicyConfig, Role, sharing
from services.router.policy.health import HealthConfig

_NUM_QUEUED = 200
_NUM_PARKED = 50
_NUM_SAMPLES = 200
_MESSAGE_S = 0.0002
"""Between two inputs: all of a figure's samples fall into a fraction of a second, so that nobody ages meanwhile."""
_SHORT_PROMPT, _PROMPT, _LONG_PROMPT, _OUTPUT = 64, 256, 2048, 128
_BLOCK_SIZE = 16
_NO_HASHES: Mapping[int, PromptHashes] = {}
_NUM_BLOCKS = 4096
_HEALTH = HealthConfig(canaries=True, recheck_s=3600.0, starts_slowly=True)


def measure(repeats: int) -> list[Figure]:
    figures = [Figure("plain loop: a million additions", "ms", tuple(_plain_loop() for _ in range(max(3, repeats))))]
    for number in (2, 8, 32):
        samples = [sample for _ in range(repeats) for sample in _load_messages(number)]
        name = f"empty load message, {_NUM_QUEUED} queued, {number}+{number} workers"
        figures.append(Figure(name, "ms", tuple(samples), "p50 <= 0.05"))
    for number in (2, 8, 32):
        samples = [sample for _ in range(repeats) for sample in _Cluster(number, 0, _NUM_QUEUED, _NUM_PARKED).loads()]
        name = f"the same with {_NUM_PARKED} parked, {number}+{number} workers"
        figures.append(Figure(name, "ms", tuple(samples), "p50 <= 0.05"))
    for num_queued in (0, _NUM_QUEUED):
        few, many = _Cluster(50, 1000, num_queued), _Cluster(50, 4000, num_queued)
        what = f"50+50 workers, 1000 live, {num_queued} of them queued"
        if not num_queued:
            figures += _compared(
                f"submit and place: {what}", "p50 <= 0.3, p99 <= 1", few.submits, many.submits, repeats
            )
        figures += _compared(f"tick: {what}", "<= 2", few.ticks, many.ticks, repeats)
    with_deadlines = _Cluster(50, 1000, _NUM_QUEUED, deadline_s=3600.0)
    samples = tuple(sample for _ in range(repeats) for sample in with_deadlines.ticks())
    figures.append(Figure(f"tick: the same, {_NUM_QUEUED} queued with deadlines", "ms", samples, "<= 2"))
    for num_queued in (_NUM_QUEUED, 1000):
        cluster = _Cluster(50, 1000 + num_queued, num_queued)
        samples = tuple(sample for _ in range(repeats) for sample in cluster.submits_with_deadline())
        figures.append(Figure(f"submit with a deadline: {num_queued} queued before it", "ms", samples))
    return figures + _shared_prefixes(repeats)


def _shared_prefixes(repeats: int) -> list[Figure]:
    """Measures what a long prompt costs whose beginning all workers have, by itself and so that it can be brought."""
    what, token_ids = f"a prompt of {_LONG_PROMPT} tokens", list(range(_LONG_PROMPT))
    hashing = []
    for _ in range(_NUM_SAMPLES):
        began_s = time.thread_time()
        hashes = short_hashes(block_hashes(token_ids, _BLOCK_SIZE))
        hashing.append((time.thread_time() - began_s) * 1000)
    figures = [Figure(f"hashing {what} (on a thread)", "ms", tuple(hashing))]
    for number in (1, 2, 50):
        ways = {}
        for way in ("never", "auto"):
            cluster = _Cluster(number, 0, 0, share_prefixes=way)
            cluster.tell(hashes)
            ways[way] = [sample for _ in range(repeats) for sample in cluster.submits_hashed(hashes)]
            name = f"submit and place {what}, {number}+{number} workers and a store, --share-prefixes {way}"
            figures.append(Figure(name, "ms", tuple(ways[way])))
    return figures


def _compared(
    name: str, target: str, few: Callable[[], list[float]], many: Callable[[], list[float]], repeats: int
) -> list[Figure]:
    """Measures a cost with 1,000 live requests and with 4,000, in turns."""
    pairs = [(few(), many()) for _ in range(repeats)]
    figures = [Figure(name, "ms", tuple(sample for one, _ in pairs for sample in one), target)]
    figures.append(Figure("  99th of 100", "ms", tuple(statistics.quantiles(one, n=100)[98] for one, _ in pairs)))
    ratios = tuple(statistics.median(other) / statistics.median(one) for one, other in pairs)
    figures.append(Figure("  4000 live: times as long", "x", ratios, "<= 1.5"))
    return figures


def _plain_loop() -> float:
    began_s, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return (time.thread_time() - began_s) * 1000


def _load_messages(number: int) -> list[float]:
    return _Cluster(number, 0, _NUM_QUEUED).loads()


class _Cluster:
    """Simulates `number` prefill workers and as many decode workers, which answer at once."""

    def __init__(
        self,
        number: int,
        num_live: int,
        num_queued: int,
        num_parked: int = 0,
        *,
        deadline_s: float | None = None,
        share_prefixes: str = "never",
    ) -> None:
        policy = sharing(PolicyConfig(), share_prefixes)
        config = CoordinatorConfig(model_context_tokens=8192, max_queue=8192, health=_HEALTH, policy=policy)
        self._coordinator = Coordinator(config)
        self._now = 1000.0
        self._workers: dict[str, WorkerInfo] = {}
        self._num_snapshots = 0
        self._num_submitted = 0
        self._live: deque[SendLeg] = deque()
        self._join(number)
        self._report(busy=False)
        for _ in range(num_live - num_queued):
            self._live.append(self._decode(self._submit(_PROMPT)))
        handoffs = [self._submit(_PROMPT) for _ in range(num_parked)]
        self._report(busy=bool(num_queued))
        for sent in handoffs:
            self._start(sent)
        if num_queued:
            self._submit(_SHORT_PROMPT)  # with no handoff in flight, one would be let through
            for _ in range(num_queued):
                self._submit(_PROMPT, None if deadline_s is None else self._now + deadline_s)
            self._coordinator.take_actions()
        gc.collect()

    # What is measured, in milliseconds

    def loads(self) -> list[float]:
        """Times heartbeats of decode workers in turn, which repeat their last load."""
        decoders = [info for info in self._workers.values() if info.roles is Role.DECODE]
        samples = []
        for number in range(_NUM_SAMPLES):
            info = decoders[number % len(decoders)]
            load = self._load_of(info, busy=True)
            samples.append(self._timed(lambda info=info, load=load: self._say(info, load)))  # type: ignore[misc]
        return samples

    def submits(self) -> list[float]:
        """Times requests that find room at once; for each that comes, one goes."""
        samples = []
        for _ in range(_NUM_SAMPLES):
            sent: list[SendLeg] = []
            samples.append(self._timed(lambda sent=sent: sent.append(self._submit(_PROMPT))))  # type: ignore[misc]
            self._live.append(self._decode(sent[0]))
            self._finish(self._live.popleft())
        return samples

    def tell(self, hashes: PromptHashes) -> None:
        """Lets a store join, and has each worker tell that it has some first blocks of a prompt."""
        self._add("store", Role.STORE)
        self._say(self._workers["store"], self._load_of(self._workers["store"], busy=False))
        chance = random.Random(1)
        for info in self._workers.values():
            told = hashes[: chance.randrange(len(hashes))]
            self._coordinator.cache_changed(info.worker_id, 1, whole=True, stored=told, removed=())

    def submits_hashed(self, hashes: PromptHashes) -> list[float]:
        """Times long prompts that find room at once, as `submits` does. Each is over before the next."""
        by_size = {_BLOCK_SIZE: hashes} if self._coordinator.block_sizes_to_hash() else {}
        samples = []
        for _ in range(_NUM_SAMPLES):
            sent: list[SendLeg] = []
            samples.append(self._timed(lambda sent=sent: sent.append(self._submit(_LONG_PROMPT, hashes=by_size))))  # type: ignore[misc]
            assert bool(by_size) is (sent[0].keep_at is not None)
            self._finish(self._decode(sent[0]))
        return samples

    def submits_with_deadline(self) -> list[float]:
        """Times requests with a deadline that are queued behind the others; each leaves before the next."""
        samples = []
        for _ in range(_NUM_SAMPLES):
            samples.append(self._timed(lambda: self._submit(_PROMPT, self._now + 3600.0)))  # type: ignore[arg-type, return-value]
            self._coordinator.cancel(f"r{self._num_submitted}", self._now)
            self._turn()
        return samples

    def ticks(self) -> list[float]:
        return [self._timed(self._tick) for _ in range(_NUM_SAMPLES // 4)]

    def _timed(self, act: Callable[[], None]) -> float:
        self._now += _MESSAGE_S
        began_s = time.thread_time()
        act()
        return (time.thread_time() - began_s) * 1000

    # What happens

    def _turn(self) -> list[object]:
        """Does what one turn of the event loop does after its input."""
        self._coordinator.place(self._now)
        return list(self._coordinator.take_actions())

    def _say(self, info: WorkerInfo, load: Load) -> None:
        self._coordinator.worker_events(info.worker_id, info.incarnation, (), load, self._now)
        self._turn()

    def _tick(self) -> None:
        self._coordinator.tick(self._now)
        self._turn()

    def _submit(
        self, num_tokens: int, deadline_s: float | None = None, hashes: Mapping[int, PromptHashes] = _NO_HASHES
    ) -> SendLeg | None:
        self._num_submitted += 1
        spec = RequestSpec(
            f"r{self._num_submitted}",
            tuple(range(num_tokens)),
            _OUTPUT,
            deadline_s=deadline_s,
            block_hashes=hashes,
        )
        self._coordinator.submit(spec, self._now)
        return next(
            (action for action in self._turn() if isinstance(action, SendLeg) and action.phase is Role.PREFILL), None
        )

    def _decode(self, sent: SendLeg | None) -> SendLeg:
        """Hands it over, as far as its second token."""
        actions = self._start(sent)
        decode = next(action for action in actions if isinstance(action, SendLeg) and action.phase is Role.DECODE)
        events = (DecodeAdmitted(decode.leg), ImportReady(decode.leg), Tokens(decode.leg, 0, (1, 2)))
        self._coordinator.worker_events(decode.worker_id, 1, events, None, self._now)
        self._turn()
        return decode

    def _start(self, sent: SendLeg | None) -> list[object]:
        """Computes its prompt; where no decode worker has room, the handoff is parked."""
        assert sent is not None, "no room"
        leg = sent.leg
        started = PrefillStarted(leg, leg.to_bytes(16, "big"), source=None)
        self._coordinator.worker_events(sent.worker_id, 1, (started, Tokens(leg, 0, (1,))), None, self._now)
        return self._turn()

    def _finish(self, decode: SendLeg) -> None:
        last = Tokens(decode.leg, 2, (3,), finish=SequenceEnd(FinishReason.STOP))
        self._coordinator.worker_events(decode.worker_id, 1, (last,), None, self._now)
        self._turn()

    # Workers

    def _join(self, number: int) -> None:
        for role in (Role.PREFILL, Role.DECODE):
            for index in range(number):
                self._add(f"{role.label}-{index}", role)
        # All canaries pass, and slow starts are over.
        table = self._coordinator._book.workers
        for info in self._workers.values():
            table.succeeded(info.worker_id, self._now)
        for source in (info for info in self._workers.values() if info.roles is Role.PREFILL):
            for target in (info for info in self._workers.values() if info.roles is Role.DECODE):
                table.transfer_succeeded(source, target.worker_id, self._now)
        for canary in list(self._coordinator._canaries._live):
            self._coordinator._canaries.worker_gone((canary.source or canary.target).worker_id)  # type: ignore[union-attr]
        for _ in range(200):
            self._now += 0.1
            table.awake.at(self._now)
        table.tick(self._now)
        self._turn()

    def _add(self, worker_id: str, role: Role) -> None:
        info = WorkerInfo(
            worker_id,
            role,
            1,
            Fingerprint("kv", "float32"),
            _BLOCK_SIZE,
            _NUM_BLOCKS,
            8192,
            max_num_seqs=256,
            description=worker_id,
        )
        self._workers[worker_id] = info
        self._coordinator.worker_joined(info, self._now)
        self._coordinator.session_opened(worker_id, 1, self._now)

    def _report(self, *, busy: bool) -> None:
        for info in self._workers.values():
            load = self._load_of(info, busy=busy and info.roles is Role.DECODE)
            self._coordinator.worker_events(info.worker_id, 1, (), load, self._now)
            self._turn()

    def _load_of(self, info: WorkerInfo, *, busy: bool) -> Load:
        """Returns a snapshot of a worker that is full if `busy`, and else has room for all that is asked here."""
        self._num_snapshots += 1
        free = 0 if busy else info.num_blocks - 64
        return Load(
            self._num_snapshots,
            blocks_active=info.num_blocks - free,
            blocks_free=free,
            num_running=20,
            ms_per_prefill_token=0.1,
            ms_per_decode_step=10.0,
            ms_per_decode_sequence=0.1,
        )
