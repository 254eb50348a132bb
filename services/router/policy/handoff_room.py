"""Keeps room at decode workers for the handoffs on their way, when a sequence is to run there unsplit. Pure.

A handoff's decode worker is chosen when its lease is open: until then its room is nobody's, and the sum of the workers'
room says little, since a handoff needs all of its own on one of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace

from services.router.policy.filter import import_blocks
from services.router.policy.views import HandoffsInFlight, Job, WorkerView

_MOST_HANDOFFS = 256
"""Of more, no room is looked for, since that takes a microsecond for each, for every request of the queue."""


def beside_handoffs(
    job: Job, workers: Sequence[WorkerView], handoffs: HandoffsInFlight, output_tokens: float
) -> list[WorkerView]:
    """Returns the workers that have room for the job beside all the handoffs; none if not all of these find room, or
    there are more than `_MOST_HANDOFFS`.

    The longest handoff is reserved its room first, and each where most is left, as placement would choose by room.
    Until they come the job grows by its output, `output_tokens` as a rule, and each running sequence by a half of it.
    """
    if not handoffs:
        return list(workers)
    if handoffs.number > _MOST_HANDOFFS:
        return []
    places = [worker.max_num_seqs - worker.num_sequences for worker in workers]
    left = [
        (_blocks_to_grow(worker, output_tokens) - worker.available_blocks, index)
        for index, worker in enumerate(workers)
        if places[index] > 0
    ]
    heapq.heapify(left)  # by the blocks that are left, which are negated
    for num_tokens in handoffs.longest_first():
        if not left:
            return []
        negated, index = left[0]
        negated += workers[index].blocks_for(num_tokens) + 1
        if negated > 0:
            return []
        places[index] -= 1
        if places[index] > 0:
            heapq.heapreplace(left, (negated, index))
        else:
            heapq.heappop(left)
    grown = replace(job, num_tokens=min(job.total_tokens, job.num_tokens + math.ceil(output_tokens)))
    return [workers[index] for negated, index in left if -negated >= import_blocks(grown, workers[index])]


def _blocks_to_grow(worker: WorkerView, output_tokens: float) -> int:
    """Returns the blocks that its sequences are still expected to take: they are half way, on average."""
    return math.ceil(worker.num_sequences * output_tokens / 2 / worker.block_size)
