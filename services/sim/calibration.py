"""Computes what the workers of a running cluster cost: from what they say of themselves, or from what requests show."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from baton.v1 import types_pb2
from baton_client import AsyncClient
from services.core.errors import BatonError, ConfigError, NoWorker
from services.kv.layout import token_bytes
from services.sim.fitting import fitted
from services.sim.probing import probe
from services.sim.profile import WorkerProfile
from services.sim.trace import FIRST_TOKEN_ID


def workers_of(status: Any, model: str) -> list[Any]:
    """Returns the workers of a model that have a session; of the router's own if `model` is empty. Raises NoWorker."""
    names = [each.model_id for each in status.models]
    model = model or next(iter(names), "")
    found = [each for each in status.workers if each.has_session and each.worker.layout.model_id == model]
    if not found:
        raise NoWorker(f"no worker of {model} is there; models: {', '.join(names) or 'none'}", retry_after_s=1.0)
    return found


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


def measured(
    known: WorkerProfile,
    workers: Sequence[Any],
    dial: Callable[[], AsyncClient],
    within_s: float,
    tell: Callable[[str, float], None],
) -> WorkerProfile:
    """Returns the profile that requests to the cluster show, which must do nothing else. `dial` gives a client of its
    router's port for clients. An interrupt ends the measurements, as the time does. Raises BatonError, and the client's
    errors."""
    own = [set(each.worker.roles) for each in workers]
    prefill, decode = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE
    dedicated = any(len(roles) == 1 for roles in own)
    one_host = len({each.worker.host_id for each in workers}) == 1
    context_tokens = min(each.worker.max_model_len for each in workers)
    model = workers[0].worker.layout.model_id
    vocab_size = min(each.worker.vocab_size for each in workers)
    if vocab_size <= FIRST_TOKEN_ID:
        raise BatonError(f"{model} has {vocab_size} tokens, too few to make up prompts of")
    timings = asyncio.run(
        probe(
            dial,
            model,
            context_tokens,
            vocab_size,
            (sum(prefill in roles for roles in own), sum(decode in roles for roles in own)),
            handed_over=dedicated,
            beside=dedicated and one_host,
            within_s=within_s,
            tell=tell,
        )
    )
    return fitted(known, timings)
