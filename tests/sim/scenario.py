"""Draws what a seed's cluster looks like and what is asked of it: small pools, short prompts with shared beginnings."""

from __future__ import annotations

import dataclasses
import random
import zlib
from dataclasses import dataclass

from baton.v1 import inference_pb2, types_pb2
from services.core.hashing import num_blocks_for
from services.core.seeds import answer_seed
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import PRESETS, PolicyConfig, Split, sharing
from services.router.policy.health import HealthConfig
from services.worker.config import WorkerConfig
from services.worker.phase import role_name
from tests.sim.client import SimRequest
from tests.sim.cluster import Cluster
from tests.sim.model import EOS, OTHER_ENGINE, VOCAB_SIZE, Truth
from tests.sim.network import Network
from tests.sim.worker import DECODE, MIXED, PREFILL, STORE, SimWorker, WorkerPlan, constraint_text
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


def num_stores(seed: int) -> int:
    """Returns how many stores the cluster has: one or two in four clusters out of thirteen. The seed itself decides, as
    in `policy_of`."""
    return {5: 1, 6: 2, 8: 1, 11: 1}.get(seed % 13, 0)


def policy_of(seed: int) -> PolicyConfig:
    """Returns how the routers place requests: in four clusters out of five by default, in others by each preset in
    turn. The seed itself decides, so that all other draws are the same; the seeds named in `test_simulation.py` have
    the default."""
    presets = list(PRESETS.values())
    policy = presets[seed // 5 % len(presets)] if seed % 5 == 3 else PolicyConfig()
    return sharing(policy, "auto") if shares_prefixes(seed) else policy


def shares_prefixes(seed: int) -> bool:
    """Returns whether prompts are hashed so that workers bring prefixes from one another, whatever the policy: in two
    clusters out of seventeen, by the seed itself."""
    return seed % 17 in (4, 10)


def has_tiers(seed: int) -> bool:
    """Returns whether workers have tiers below their pools, which then are small, and prompts come again: in three
    clusters out of fourteen. The seed itself decides, as in `policy_of`."""
    return seed % 14 in (2, 7, 12)


def computes_wrong(seed: int) -> bool:
    """Returns whether a worker computes wrong from some moment on: in three clusters out of twenty-one, all of which
    have canaries. The seed itself decides, as in `policy_of`."""
    return seed % 21 in (0, 12, 18) and seed % 16 != 9  # where all that happens is pauses


def _num_tier_slots(seed: int, at: int) -> tuple[int, int]:
    """Returns how many blocks fit into the host tier and onto the disk of a worker: few, or many."""
    if not has_tiers(seed):
        return 0, 0
    choose = random.Random(f"tiers of {seed} {at}")
    return choose.choice(((0, 40), (0, 4), (0, 12), (40, 0), (4, 12), (12, 40)))


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
    return Load(tight=growing or world.chance(0.4) or has_tiers(world.seed), growing=growing)


def transport_of(seed: int) -> str:
    """Returns by what all workers of a seed's cluster hand over: by the seed itself, so that the draws are the same.
    Empty where each of them draws it."""
    return {1: "tcp", 4: "tcp", 8: "nixl"}.get(seed % 9, "")


def build(world: World, load: Load) -> Cluster:
    choose = world.random
    network = Network(world, latency_s=choose.choice((0.0002, 0.001, 0.005)), window=choose.choice((2, 16, 64)))
    # By the seed itself, so that the other draws are the same: some clusters are in the middle of a change of weights,
    # and every other worker has the next ones; or it computes by another engine.
    weights = ("sim-0", "sim-1" if world.seed % 2 else OTHER_ENGINE)[: 2 if world.seed % 7 == 3 else 1]
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
        park_after_s=(0.0, 0.02, 0.1)[world.seed % 3],
        # By the seed itself, so that the other draws are the same with and without.
        health=HealthConfig(
            canaries=world.seed % 3 == 0,
            recheck_s=1.0 if computes_wrong(world.seed) else 5.0,
            max_pause_s=MAX_PAUSE_S,
            starts_slowly=True,
        ),
    )
    num_routers = 2 if world.chance(0.2) else 1
    for at, name in enumerate(ROUTERS[:num_routers]):
        cluster.start_router(name, f"10.0.1.{at + 1}:50051", config)
    # By the seed itself, too: two out of five clusters are of GPUs, with few staging slots.
    num_slots = (0, 0, 1, 0, 3)[world.seed % 5]
    plans = _plans(choose, num_routers, load, sizes)
    if num_stores(world.seed):
        plans = _crowded(plans)
    for at, plan in enumerate(plans):
        if transport := transport_of(world.seed):
            plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, transport=transport))
        num_host_slots, num_disk_slots = _num_tier_slots(world.seed, at)
        varied = {
            "num_host_slots": num_host_slots,
            "num_disk_slots": num_disk_slots,
            "num_slots": num_slots,
            "weights": weights[at % len(weights)],
            "says_token_ms": _says_token_ms(world.seed, plan),
            # Streams still run when a worker is found that computes wrong.
            "step_s": max(plan.step_s, 0.02) if computes_wrong(world.seed) else plan.step_s,
        }
        cluster.start_worker(dataclasses.replace(plan, **varied))
    for plan in _stores(world.seed, list(cluster.workers.values())):
        cluster.start_worker(plan)
    return cluster


def _crowded(plans: list[WorkerPlan]) -> list[WorkerPlan]:
    """Returns the workers of a cluster in which much is parked: the first only prefills, and whoever decodes has one
    sequence at a time."""
    if len(plans) == 1:
        return plans
    first, *others = plans
    one_each = [
        dataclasses.replace(plan, config=dataclasses.replace(plan.config, max_num_seqs=1), phases=DECODE)
        if plan.can_decode
        else plan
        for plan in others
    ]
    return [dataclasses.replace(first, phases=PREFILL), *one_each]


def _stores(seed: int, workers: list[SimWorker]) -> list[WorkerPlan]:
    """Returns stores for what the first worker computes: some have room for a handoff or two, others for all."""
    choose, first = random.Random(f"stores of {seed}"), workers[0].plan
    return [
        dataclasses.replace(
            first,
            config=dataclasses.replace(
                first.config,
                worker_id=f"s{number}",
                advertise=f"10.0.2.{number + 1}:6000",
                kv_blocks=num_blocks_for(choose.choice((6, 12, 200)) * BLOCK_SIZE, first.config.block_size),
            ),
            phases=STORE,
            num_slots=0,
        )
        for number in range(num_stores(seed))
    ]


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
            checksums="always" if choose.random() < 0.2 else "never",
            lease_ttl_s=lease_ttl_s,
            stall_s=stall_s,
            silence_s=choose.choice((2.0, 5.0)),
        )
        plans.append(WorkerPlan(config, phases, step_s, copy_s))
    return plans


def requests(world: World, cluster: Cluster, load: Load) -> list[SimRequest]:
    choose = world.random
    stems = [[choose.randrange(1, VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    configs = [worker.plan.config for worker in cluster.workers.values() if not worker.plan.is_store]
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
    if has_tiers(world.seed):
        made += _again(world, cluster, made, load)
    if computes_wrong(world.seed):
        for name in ("w", "x"):
            made += _again(world, cluster, made, load, name, longest_s=8.0)
    return made


def crowd(world: World, cluster: Cluster, load: Load, name: str) -> list[SimRequest]:
    """Returns requests that arrive soon, begin as one of two others did, so that much of them is cached, and run for
    long: some of them still do when a worker is found to compute wrong."""
    choose, computing = world.random, [worker for worker in cluster.workers.values() if not worker.plan.is_store]
    context = min(40, *(worker.engine.info.max_model_len for worker in computing))
    before, made = [request.message for request in cluster.requests[:2]], list[SimRequest]()
    for number in range(choose.randint(3, 7)):
        message, arrival_s = choose.choice(before), world.now_s + choose.random() * 0.3
        prompt = list(message.token_ids.ids)[: context // 2] + choose.choices(range(1, VOCAB_SIZE), k=number % 2)
        made.append(
            _request(
                world, cluster, f"{name}{number}", arrival_s, prompt, context, load, message.cache_salt, num_tokens=30
            )
        )
        made[-1].deadline_s = made[-1].cancel_after_s = made[-1].cancel_at_token = None
    return made


def _again(
    world: World,
    cluster: Cluster,
    made: list[SimRequest],
    load: Load,
    name: str = "a",
    longest_s: float = BUSY_S,
) -> list[SimRequest]:
    """Returns requests that go on where others ended: their prompts begin with those of the others."""
    choose, again = world.random, list[SimRequest]()
    context = min(worker.engine.info.max_model_len for worker in cluster.workers.values() if not worker.plan.is_store)
    context = min(context, 40)
    for number in range(choose.randint(3, 12)):
        before = choose.choice(made).message
        prompt = list(before.token_ids.ids)[: context - 4]
        num_new = choose.randint(0, min(3, context - 4 - len(prompt)))
        prompt += [choose.randrange(1, VOCAB_SIZE) for _ in range(num_new)]
        arrival_s = 0.3 + choose.random() * longest_s
        request = _request(world, cluster, f"{name}{number}", arrival_s, prompt, context, load, before.cache_salt)
        again.append(request)
    return again


def _prompt(choose: random.Random, context: int, stem: list[int], load: Load) -> list[int]:
    """Begins as others do."""
    num_prompt = choose.randint(1, min(14, context - 2) if load.growing else context - 2)
    shared = choose.randint(0, num_prompt)
    return stem[:shared] + [choose.randrange(1, VOCAB_SIZE) for _ in range(num_prompt - shared)]


def _request(
    world: World,
    cluster: Cluster,
    name: str,
    arrival_s: float,
    prompt: list[int],
    context: int,
    load: Load,
    cache_salt: str | None = None,
    num_tokens: int | None = None,
) -> SimRequest:
    choose = world.random
    message = inference_pb2.GenerateRequest(request_id=name, priority=choose.choice((0, 0, 0, 1)))
    message.token_ids.ids.extend(prompt)
    if num_tokens is None:
        num_tokens = 30 if load.growing else choose.choice((1, 3, 8, 16))
    message.stopping.max_tokens = min(num_tokens, context - len(prompt))
    message.stopping.min_tokens = choose.choice((0, 0, 2))
    if choose.random() < 0.3:  # many stops: the first token may end it
        message.stopping.stop_token_ids.extend(sorted(choose.sample(range(1, VOCAB_SIZE), 15)))
    message.cache_salt = choose.choice(("", "", "salt"))
    if cache_salt is not None:
        message.cache_salt = cache_salt
    _choose_sampling(choose, message)
    if one_of := _one_of(world, name):
        message.constraint.grammar = constraint_text(one_of)
    if zlib.crc32(name.encode()) % 6 == 0:
        message.response.prompt_logprobs = 0
    expected = [
        cluster.truth.add(
            prompt,
            max_tokens=message.stopping.max_tokens,
            min_tokens=message.stopping.min_tokens,
            stop_token_ids=frozenset(message.stopping.stop_token_ids) | {EOS},
            cache_salt=message.cache_salt,
            sampling=_sampling_of(message, index),
            stops=message.stopping.stop,
            one_of=one_of,
        )
        for index in range(_choose_answers(world.seed, message))
    ]
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


def _one_of(world: World, name: str) -> list[list[int]]:
    """Returns the outputs that the request's constraint allows: in one cluster out of four, for half of the requests;
    none if it has no constraint. The seed itself decides, with a generator of its own, as in `block_sizes`."""
    choose = random.Random(f"constraint of {name} in {world.seed}")
    if world.seed % 4 != 2 or choose.random() < 0.5:
        return []
    stem = choose.choices(range(1, VOCAB_SIZE), k=choose.randint(0, 6))
    return [
        stem[: choose.randint(0, len(stem))] + choose.choices(range(1, VOCAB_SIZE), k=choose.randint(1, 12))
        for _ in range(choose.randint(1, 40))
    ]


def _choose_answers(seed: int, message: inference_pb2.GenerateRequest) -> int:
    """Fills in how many answers are asked for, and returns it: of two seeds out of five, half of the requests want
    several. It is chosen by the seed itself, so that the other draws are the same."""
    choose = random.Random(f"answers of {seed} {message.request_id}")
    if seed % 5 in (1, 2) and choose.random() < 0.5:
        message.n = choose.choice((2, 2, 3, 5))
    return message.n or 1


def _sampling_of(message: inference_pb2.GenerateRequest, index: int) -> types_pb2.SamplingParams:
    """Returns the sampling of the answer with that index."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(message.sampling)
    sampling.seed = answer_seed(message.sampling.seed, index)
    return sampling


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
    return SimRequest(world, message, [expected], arrival_s=world.now_s, router=router)
