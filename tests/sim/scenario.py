"""Draws what a seed's cluster looks like and what is asked of it: small pools, short prompts with shared beginnings."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from services.core.hashing import num_blocks_for
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import PRESETS, PolicyConfig, Split
from services.router.policy.health import HealthConfig
from services.worker.config import WorkerConfig
from services.worker.phase import role_name
from tests.sim.client import SimRequest
from tests.sim.cluster import Cluster
from tests.sim.model import EOS, VOCAB_SIZE, Truth
from tests.sim.network import Network
from tests.sim.worker import DECODE, MIXED, PREFILL, WorkerPlan
from tests.sim.world import World

BLOCK_SIZE = 4
"""Tokens of a block in most clusters; see `block_sizes`."""
_MOST_WORKERS = 4
ROUTERS = ("router-1", "router-2")
MAX_PAUSE_S = 4.0
"""Between two probes of a worker that keeps failing."""
BUSY_S = 2.0
"""Requests arrive, and faults begin, in this time."""


@dataclass(frozen=True)
class Load:
    """Says how a seed fills its pools."""

    tight: bool
    """They hold a request or two."""
    growing: bool
    """Short prompts and long outputs: sequences outgrow the pool together and push each other out."""


def block_sizes(seed: int) -> list[int]:
    """Returns how many tokens a block holds at the first, second, … worker.

    The seed itself decides, with a generator of its own, so that all other draws are the same: five clusters out of
    eight have `BLOCK_SIZE` (the seeds named in `test_simulation.py` are among them), one has smaller blocks, one has
    larger ones, and in one each worker has its own, so that some pair and others do not.
    """
    match seed % 8:
        case 1:
            return [2] * _MOST_WORKERS
        case 7:
            return [8] * _MOST_WORKERS
        case 4:
            choose = random.Random(f"block sizes of {seed}")
            return choose.choices((2, 4, 8), k=_MOST_WORKERS)
    return [BLOCK_SIZE] * _MOST_WORKERS


def policy_of(seed: int) -> PolicyConfig:
    """Returns how the routers place requests: in four clusters out of five by default, in others by each preset in
    turn. The seed itself decides, so that all other draws are the same; the seeds named in `test_simulation.py` have
    the default."""
    presets = list(PRESETS.values())
    return presets[seed // 5 % len(presets)] if seed % 5 == 3 else PolicyConfig()


def split_of(seed: int) -> Split:
    """Returns which prompts are split: all in nine clusters out of eleven, in one those for which it pays, in one none.
    The seed itself decides, as in `policy_of`."""
    return {6: Split.AUTO, 8: Split.NEVER}.get(seed % 11, Split.ALWAYS)


def _says_token_ms(seed: int, plan: WorkerPlan) -> float:
    """Returns what a worker says of its costs: where splitting is to pay, decode workers seem to be so fast that they
    had better run whole sequences, but for some."""
    if split_of(seed) is not Split.AUTO:
        return 0.0
    if types_pb2.WORKER_ROLE_PREFILL in plan.phases:
        return 2.0
    return random.Random(f"costs of {seed} {plan.config.worker_id}").choice((0.01, 0.1, 2.0))


def choose_load(world: World) -> Load:
    growing = world.chance(0.3)
    return Load(tight=growing or world.chance(0.4), growing=growing)


def build(world: World, load: Load) -> Cluster:
    choose = world.random
    network = Network(world, latency_s=choose.choice((0.0002, 0.001, 0.005)), window=choose.choice((2, 16, 64)))
    # By the seed itself, so that the other draws are the same: some clusters are in the middle of a change of weights,
    # and every other worker has the next ones.
    weights = ("sim-0", "sim-1")[: 2 if world.seed % 7 == 3 else 1]
    sizes = block_sizes(world.seed)
    cluster = Cluster(world, network, Truth(set(sizes), weights))
    config = CoordinatorConfig(
        model_context_tokens=30 * BLOCK_SIZE,  # as many as the largest pool holds
        queue_timeout_s=15.0,
        no_worker_timeout_s=8.0,
        answer_timeout_s=4.0,
        canary_timeout_s=4.0,
        aging_s=3.0,
        policy=policy_of(world.seed),
        split=split_of(world.seed),
        max_queue=1 if world.seed % 10 == 4 else 1024,
        # By the seed itself, so that the other draws are the same with and without.
        health=HealthConfig(canaries=world.seed % 3 == 0, recheck_s=5.0, max_pause_s=MAX_PAUSE_S, starts_slowly=True),
    )
    num_routers = 2 if world.chance(0.2) else 1
    for at, name in enumerate(ROUTERS[:num_routers]):
        cluster.start_router(name, f"10.0.1.{at + 1}:50051", config)
    # By the seed itself, too: two out of five clusters are of GPUs, with few staging slots.
    num_slots = (0, 0, 1, 0, 3)[world.seed % 5]
    for at, plan in enumerate(_plans(choose, num_routers, load, sizes)):
        varied = {
            "num_slots": num_slots,
            "weights": weights[at % len(weights)],
            "drafts": world.seed % 3 == 1,
            "says_token_ms": _says_token_ms(world.seed, plan),
        }
        cluster.start_worker(dataclasses.replace(plan, **varied))
    return cluster


def _plans(choose: random.Random, num_routers: int, load: Load, sizes: list[int]) -> list[WorkerPlan]:
    roles = choose.choice(
        (
            [PREFILL, DECODE],
            [PREFILL, DECODE, DECODE],
            [PREFILL, DECODE, DECODE],
            [PREFILL, PREFILL, DECODE],
            [PREFILL, PREFILL, DECODE, DECODE],
            [PREFILL, MIXED],
            [DECODE, MIXED],
            [MIXED, MIXED],
            [MIXED],
            [PREFILL, DECODE, MIXED],
        )
    )
    if load.growing and choose.random() < 0.6:
        roles = [MIXED] * len(roles[:2])
    lease_ttl_s = choose.choice((1.0, 1.0, 2.0, 10.0))
    stall_s = choose.choice((0.3, 0.5, 1.5, 5.0))
    step_s = choose.choice((0.002, 0.01, 0.04))
    copy_s = choose.choice((0.001, 0.02, 0.2))
    transports = choose.choice((("auto",), ("auto", "grpc"), ("shm",)))
    plans = []
    for at, phases in enumerate(roles):
        num_blocks = choose.randint(5, 10) if load.tight else choose.randint(10, 30)
        config = WorkerConfig(
            worker_id=f"{role_name(phases)[0]}{at}",
            advertise=f"10.0.0.{at + 1}:6000",
            router=tuple(f"10.0.1.{number + 1}:50051" for number in range(num_routers)),
            kv_blocks=num_blocks_for(num_blocks * BLOCK_SIZE, sizes[at]),  # as many tokens, whatever a block holds
            block_size=sizes[at],
            max_num_seqs=choose.choice((4, 8) if load.growing else (1, 2, 4, 8)),
            max_model_len=64,
            max_num_batched_tokens=choose.choice((4, 8) if load.growing else (4, 8, 32)),
            transport=choose.choice(transports),
            checksums=choose.random() < 0.2,
            lease_ttl_s=lease_ttl_s,
            stall_s=stall_s,
            silence_s=choose.choice((2.0, 5.0)),
        )
        plans.append(WorkerPlan(config, phases, step_s, copy_s))
    return plans


def requests(world: World, cluster: Cluster, load: Load) -> list[SimRequest]:
    choose = world.random
    stems = [[choose.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    configs = [worker.plan.config for worker in cluster.workers.values()]
    contexts = [config.kv_blocks * config.block_size for config in configs]
    # Mostly what every worker could hold; now and then what only some can.
    made = []
    burst_s = 0.05 + choose.random() * BUSY_S / 2
    for number in range(choose.randint(3, 9)):
        # Most come together, so that they get into each other's way.
        arrival_s = burst_s + choose.random() * 0.05 if choose.random() < 0.6 else 0.05 + choose.random() * BUSY_S
        context = min(contexts) if choose.random() < 0.9 else max(contexts)
        prompt = _prompt(choose, min(context, 40), choose.choice(stems), load)
        made.append(_request(world, cluster, f"r{number}", arrival_s, prompt, min(context, 40), load))
        made[-1].message.session = ("", "a", "b")[number % 3]
    return made


def _prompt(choose: random.Random, context: int, stem: list[int], load: Load) -> list[int]:
    """Begins as others do."""
    num_prompt = choose.randint(1, min(14, context - 2) if load.growing else context - 2)
    shared = choose.randint(0, num_prompt)
    return stem[:shared] + [choose.randrange(1, VOCAB_SIZE) for _ in range(num_prompt - shared)]


def _request(
    world: World, cluster: Cluster, name: str, arrival_s: float, prompt: list[int], context: int, load: Load
) -> SimRequest:
    choose = world.random
    message = inference_pb2.GenerateRequest(request_id=name, priority=choose.choice((0, 0, 0, 1)))
    message.token_ids.ids.extend(prompt)
    num_tokens = 30 if load.growing else choose.choice((1, 3, 8, 16))
    message.stopping.max_tokens = min(num_tokens, context - len(prompt))
    message.stopping.min_tokens = choose.choice((0, 0, 2))
    if choose.random() < 0.3:  # many stops: the first token may end it
        message.stopping.stop_token_ids.extend(sorted(choose.sample(range(1, VOCAB_SIZE), 15)))
    message.cache_salt = choose.choice(("", "", "salt"))
    _choose_sampling(choose, message)
    expected = cluster.truth.add(
        prompt,
        max_tokens=message.stopping.max_tokens,
        min_tokens=message.stopping.min_tokens,
        stop_token_ids=frozenset(message.stopping.stop_token_ids) | {EOS},
        cache_salt=message.cache_salt,
        sampling=message.sampling,
        stops=message.stopping.stop,
    )
    leaves = choose.random()
    return SimRequest(
        world,
        message,
        expected,
        arrival_s=arrival_s,
        router=choose.choice(list(cluster.routers)),
        deadline_s=choose.uniform(0.01, 3.0) if choose.random() < 0.1 else None,
        cancel_after_s=choose.random() ** 3 if leaves < 0.2 else None,
        cancel_at_token=choose.randint(1, 3) if 0.2 < leaves < 0.3 else None,
    )


def _choose_sampling(choose: random.Random, message: inference_pb2.GenerateRequest) -> None:
    """Fills in the sampling as `Intake` leaves it: every field is given, the seed too."""
    sampling = message.sampling
    sampling.temperature = choose.choice((0.0, 0.5, 1.0))
    sampling.top_p = 1.0
    sampling.repetition_penalty = 1.0
    sampling.seed = choose.getrandbits(64)
    if choose.random() < 0.3:
        sampling.repetition_penalty = choose.choice((1.0, 1.25))
        sampling.presence_penalty = choose.choice((0.0, 0.5))
        sampling.frequency_penalty = choose.choice((0.0, -0.5))
    if choose.random() < 0.2:
        message.stopping.stop.extend(choose.choice((["acb"], ["bd", "bdb"], ["aa"], ["eaca"])))


def probe(world: World, cluster: Cluster, router: str) -> SimRequest:
    """Returns a request for when all is quiet: it must be served."""
    prompt = [1 + world.random.randrange(VOCAB_SIZE - 1) for _ in range(6)]
    message = inference_pb2.GenerateRequest(request_id=f"probe {router}")
    message.token_ids.ids.extend(prompt)
    message.stopping.max_tokens = 3
    message.sampling.temperature = 0.0
    message.sampling.repetition_penalty = 1.0
    expected = cluster.truth.add(prompt, max_tokens=3, stop_token_ids=frozenset({EOS}))
    return SimRequest(world, message, expected, arrival_s=world.now_s, router=router)
