"""Runs `baton calibrate`: writes what the workers of a running cluster cost as a profile.

Without `--measure` it is what they have measured of themselves, with it what requests to the idle cluster show.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from baton.v1 import control_pb2, types_pb2
from baton_client import CallFailed
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import control, explain, tls_of
from services.cli.probing import probe
from services.cli.simulate import check_writable, default_profile
from services.core.addresses import is_address
from services.core.errors import BatonError, ConfigError, NoWorker
from services.kv.layout import token_bytes
from services.sim.fitting import fitted
from services.sim.profile import WorkerProfile, write_profile
from services.sim.trace import FIRST_TOKEN_ID

_ASK_AGAIN_S = 0.2


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Writes the profile of a running cluster's workers, for `baton simulate`.")
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    parser.add_argument(
        "--out", default=str(default_profile()), metavar="FILE", help="(default: profile.json in BATON_HOME)"
    )
    parser.add_argument(
        "--model", default="", metavar="ID", help="which of the models that are served (default: the router's own)"
    )
    parser.add_argument("--cost-per-hour", type=float, default=1.0, help="of one worker, in any unit (default: 1)")
    parser.add_argument(
        "--measure",
        default="",
        metavar="HOST:PORT",
        help="the router's port for clients: send it requests for a minute or two, beside which nothing may run, and "
        "take what they show; without it, what the workers have measured of themselves",
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds of measurements (default: 3)")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.repeats <= 1000:
        raise ConfigError(f"--repeats: {arguments.repeats} is not from 1 to 1000")
    if not 0 <= arguments.cost_per_hour <= 1e15:
        raise ConfigError(f"--cost-per-hour: {arguments.cost_per_hour:g} must be at least 0, and finite")
    if arguments.measure and not is_address(arguments.measure):
        raise ConfigError(f"--measure: {arguments.measure!r} is not HOST:PORT")
    out = Path(arguments.out)
    check_writable(out, "--out")
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:

        def ask() -> list[Any]:
            status = call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout)
            return workers_of(status, arguments.model)

        workers = wait_for_both_roles(ask, arguments.timeout) if arguments.measure else ask()
    profile = profile_of(workers, arguments.cost_per_hour)
    if arguments.measure:
        profile = measured(profile, workers, arguments.measure, arguments.repeats)
    write_profile(out, profile)
    print(
        f"{out}: {profile.ms_per_prefill_token:.3g} ms a prompt token, {profile.ms_per_decode_step:.3g} ms a decode "
        f"step and {profile.ms_per_decode_sequence:.3g} ms for each further sequence, by {len(workers)} workers"
    )
    return 0


def workers_of(status: Any, model: str) -> list[Any]:
    """Returns the workers of a model that have a session; of the router's own if `model` is empty. Raises NoWorker."""
    names = [each.model_id for each in status.models]
    model = model or next(iter(names), "")
    found = [each for each in status.workers if each.has_session and each.worker.layout.model_id == model]
    if not found:
        raise NoWorker(f"no worker of {model} is there; models: {', '.join(names) or 'none'}", retry_after_s=1.0)
    return found


def wait_for_both_roles(
    ask: Callable[[], list[Any]],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Any]:
    """Returns the workers that `ask` names once one of them takes prompts and one decodes: a cluster is ready as soon
    as it can serve a request, when others of its workers may not have come yet. Raises NoWorker after `timeout_s`."""
    until_s = clock() + timeout_s
    while True:
        try:
            workers = ask()
            roles = {role for each in workers for role in each.worker.roles}
            if {types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE} <= roles:
                return workers
            raise NoWorker("a worker that takes prompts and one that decodes must be there", retry_after_s=1.0)
        except NoWorker:
            if clock() >= until_s:
                raise
        sleep(_ASK_AGAIN_S)


def measured(known: WorkerProfile, workers: Sequence[Any], target: str, repeats: int) -> WorkerProfile:
    """Returns the profile that requests to the cluster show, which must do nothing else. Raises BatonError."""

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    own = [set(each.worker.roles) for each in workers]
    prefill, decode = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE
    dedicated = any(len(roles) == 1 for roles in own)
    one_host = len({each.worker.host_id for each in workers}) == 1
    context_tokens = min(each.worker.max_model_len for each in workers)
    model = workers[0].worker.layout.model_id
    vocab_size = min(each.worker.vocab_size for each in workers)
    if vocab_size <= FIRST_TOKEN_ID:
        raise BatonError(f"{model} has {vocab_size} tokens, too few to make up prompts of")
    try:
        timings = asyncio.run(
            probe(
                target,
                model,
                context_tokens,
                vocab_size,
                (sum(prefill in roles for roles in own), sum(decode in roles for roles in own)),
                handed_over=dedicated,
                beside=dedicated and one_host,
                repeats=repeats,
                tell=tell,
            )
        )
    except CallFailed as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            raise ConfigError(f"--measure: {target} is not the router's port for clients (--port)") from error
        raise explain(error, target) from error
    return fitted(known, timings)


def profile_of(workers: Sequence[Any], cost_per_hour: float) -> WorkerProfile:
    """Returns the medians of the own figures of one model's workers. How many tokens a step of theirs has at most
    they do not say; it is the default, 512. Raises NoWorker if none has measured anything, and BatonError if what they
    say of themselves cannot be.

    What a phase costs is asked of the workers that have it, if there are any: the others know only what they timed at
    their start.
    """
    measured = [each for each in workers if each.load.ms_per_prefill_token and each.load.ms_per_decode_step]
    if not measured:
        raise NoWorker("no worker has measured what its steps cost", retry_after_s=1.0)

    def median(name: str, role: int) -> float:
        of_role = [each for each in measured if role in each.worker.roles] or measured
        return float(statistics.median(getattr(each.load, name) for each in of_role))

    prefill, decode = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE
    worker, layout = measured[0].worker, measured[0].worker.layout
    try:
        return WorkerProfile(
            f"{layout.model_id} on {worker.device}",
            ms_per_prefill_token=median("ms_per_prefill_token", prefill),
            ms_per_decode_step=median("ms_per_decode_step", decode),
            ms_per_decode_sequence=median("ms_per_decode_sequence", decode),
            num_blocks=worker.num_blocks,
            block_size=layout.block_size,
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
            kv_bytes_per_token=token_bytes(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype),
            cost_per_hour=cost_per_hour,
        )
    except KeyError as error:
        raise BatonError(f"{layout.model_id}: its KV has the unknown type {error}") from error
    except ConfigError as error:
        raise BatonError(f"the workers' own figures cannot be: {error}") from error
