"""Runs `baton calibrate`: writes what the workers of a running cluster cost as a profile.

Without `--measure` it is what they have measured of themselves, with it what requests to the idle cluster show.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.v1 import control_pb2, types_pb2
from baton_client import CallFailed
from services.cli.arguments import Parser, add_control
from services.cli.client import control, explain
from services.cli.probing import probe
from services.cli.simulate import PROFILE
from services.core.errors import ConfigError, NoWorker
from services.core.home import baton_home
from services.kv.layout import token_bytes
from services.sim.fitting import fitted
from services.sim.profile import WorkerProfile, write_profile


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Writes the profile of a running cluster's workers, for `baton simulate`.")
    add_control(parser)
    parser.add_argument(
        "--out", default=str(baton_home() / PROFILE), metavar="FILE", help="(default: profile.json in BATON_HOME)"
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
    with control(arguments.target, arguments.cluster_token_file) as call:
        status = call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout)
    profile = profile_of(status.workers, arguments.cost_per_hour)
    if arguments.measure:
        profile = measured(profile, status.workers, arguments.measure, arguments.repeats)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_profile(out, profile)
    print(
        f"{out}: {profile.ms_per_prefill_token:.3g} ms a prompt token, {profile.ms_per_decode_step:.3g} ms a decode "
        f"step and {profile.ms_per_decode_sequence:.3g} ms for each further sequence, by {len(status.workers)} workers"
    )
    return 0


def measured(known: WorkerProfile, workers: Sequence[Any], target: str, repeats: int) -> WorkerProfile:
    """Returns the profile that requests to the cluster show, which must do nothing else. Raises BatonError."""

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    own = [set(each.worker.roles) for each in workers if each.has_session]
    prefill, decode = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE
    if not any(prefill in roles for roles in own) or not any(decode in roles for roles in own):
        raise NoWorker("a worker that takes prompts and one that decodes must be there", retry_after_s=1.0)
    dedicated = any(len(roles) == 1 for roles in own)
    one_host = len({each.worker.host_id for each in workers}) == 1
    context_tokens = min(each.worker.max_model_len for each in workers)
    model = workers[0].worker.layout.model_id
    try:
        timings = asyncio.run(
            probe(
                target,
                model,
                context_tokens,
                min(each.worker.vocab_size for each in workers),
                (sum(prefill in roles for roles in own), sum(decode in roles for roles in own)),
                handed_over=dedicated,
                beside=dedicated and one_host,
                repeats=repeats,
                tell=tell,
            )
        )
    except CallFailed as error:
        raise explain(error, target) from error
    return fitted(known, timings)


def profile_of(workers: Sequence[Any], cost_per_hour: float) -> WorkerProfile:
    """Returns the medians of the workers' own figures. Raises NoWorker if none has measured anything.

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
