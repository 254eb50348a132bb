"""Has the scheduler of `scripted_vllm`, and what `inside.connector` does on its side: which blocks are copied when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.vllm import messages
from services.vllm.inside.link import Link
from services.vllm.messages import JsonMessage
from tests.support.scripted_ranks import OtherRank, Rank
from tests.support.scripted_vllm_controls import Controls

if TYPE_CHECKING:
    from tests.support.scripted_vllm import Pipe


@dataclass
class Request:
    added: JsonMessage
    token_ids: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_saved: int = 0
    """Blocks."""
    is_loading: bool = False
    was_loaded: bool = False
    was_scheduled: bool = False
    is_robbed: bool = False

    @property
    def id(self) -> int:
        return int(self.added["id"])


class Core:
    def __init__(
        self,
        link: Link,
        front: Pipe,
        ranks: list[Rank | OtherRank],
        num_blocks: int,
        block_size: int,
        engine: dict[str, Any],
        controls: Controls,
    ) -> None:
        self._link, self._front, self._ranks, self._controls = link, front, ranks, controls
        self._block_size, self._free = block_size, list(range(1, num_blocks + 1))
        self._num_blocks = num_blocks
        self._budget, self._most_running = engine["max_num_batched_tokens"], engine["max_num_seqs"]
        self._vocab_size = engine["vocab_size"]
        self._max_model_len = engine["max_model_len"]
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._gone: list[int] = []
        self._num_preempted = 0

    def run(self) -> None:
        for num_tokens, num_decodes in [(16, 0), (64, 0), (0, 1), (0, 2)]:  # what the warm-up measures
            self._ended(time.monotonic(), num_tokens, num_decodes, max(1, num_decodes))
        self._front.send({"kind": "ready"})
        while True:
            idle = not (self._waiting or self._running or self._gone)
            for message in self._front.take(wait=idle):
                self._hear(message)
            if not self._step():
                time.sleep(0.001)

    def _hear(self, message: JsonMessage) -> None:
        if message["kind"] == messages.ADD:
            self._waiting.append(Request(message, list(message["tokens"]), len(message["tokens"])))
        else:
            for request in (*self._waiting, *self._running):
                if request.id == message["id"]:
                    self._finish(request, "abort", [])

    def _finish(self, request: Request, reason: str, tokens: list[int]) -> None:
        for place in (self._waiting, self._running):
            if request in place:
                place.remove(request)
        self._free += request.blocks
        self._gone.append(request.id)
        self._front.send({"kind": messages.OUTPUT, "id": request.id, "tokens": tokens, "finished": reason})

    def _step(self) -> bool:
        """Runs a step, and returns whether it did anything."""
        if self._gone:
            self._controls.wait_while("hold-gone")
        preempted = []
        if self._running and any(each.num_computed for each in self._running) and self._controls.take("preempt"):
            robbed = next(each for each in self._running if each.num_computed)
            self._running.remove(robbed)
            self._free += robbed.blocks
            robbed.blocks, robbed.num_computed, robbed.is_robbed = [], 0, True
            self._waiting.insert(0, robbed)
            preempted.append(robbed.id)
            self._num_preempted += 1
        scheduled: list[tuple[Request, int]] = []
        begun, loads, budget = [], [], self._budget
        for request in list(self._running):
            num_tokens = min(budget, len(request.token_ids) - request.num_computed)
            if num_tokens and self._grow(request, request.num_computed + num_tokens):
                scheduled.append((request, num_tokens))
                budget -= num_tokens
        for request in list(self._waiting):
            if request.is_loading or len(self._running) >= self._most_running or not budget:
                break
            num_imported = request.added["kv"]["num_imported"]
            if num_imported and not request.was_loaded:
                if not self._grow(request, num_imported):
                    break
                request.is_loading = True
                slots = request.added["kv"]["slots"][: len(request.blocks)]
                loads.append({"id": request.id, "blocks": request.blocks, "slots": slots})
                continue
            num_tokens = min(budget, len(request.token_ids) - request.num_computed)
            if not self._grow(request, request.num_computed + num_tokens):
                break
            self._waiting.remove(request)
            self._running.append(request)
            if request.was_scheduled:
                preempted.append(request.id)  # it is resumed
            else:
                request.was_scheduled = True
                begun.append([request.id, request.num_computed])
            scheduled.append((request, num_tokens))
            budget -= num_tokens
        if not (scheduled or loads or self._gone):
            return False
        self._run_step(scheduled, begun, loads, preempted)
        return True

    def _run_step(
        self, scheduled: list[tuple[Request, int]], begun: list[Any], loads: list[JsonMessage], preempted: list[int]
    ) -> None:
        prefills = [(each, num) for each, num in scheduled if each.num_computed < each.num_prompt]
        num_prefill = sum(num for _, num in prefills)
        began_s = time.monotonic()
        if begun or preempted:
            self._link.send(messages.STEP, begun=begun, preempted=preempted)
        gone, self._gone = self._gone, []
        step: JsonMessage = {"loads": loads, "gone": gone, "writes": [], "saves": [], "samples": []}
        for request, num_tokens in scheduled:
            start = request.num_computed
            request.num_computed += num_tokens
            written = request.token_ids[start : request.num_computed]
            step["writes"].append({"blocks": request.blocks, "start": start, "tokens": written})
            self._save(step, request)
            if request.num_computed == len(request.token_ids):
                step["samples"].append(self._row(request))
        if prefills:
            self._controls.wait_while("hold-prefill")
        elif scheduled:
            self._controls.wait_while("hold-decode")
        for rank in self._ranks:
            rank.begin(step)
        results = [rank.end() for rank in self._ranks]
        if scheduled:
            self._ended(began_s, num_prefill, len(scheduled) - len(prefills), len(scheduled))
        failed = {seq_id for result in results for seq_id in result["failed"]}
        for load in loads:
            request = next(each for each in self._waiting if each.id == load["id"])
            request.is_loading, request.was_loaded = False, True
            request.num_computed = request.added["kv"]["num_imported"]
            if request.id in failed:
                self._finish(request, "error", [])
        ready = [request for request, _ in scheduled if request.num_computed == len(request.token_ids)]
        for request, *sampled in zip(ready, *(result["sampled"] for result in results), strict=True):
            self._sampled(request, sampled[0] if len(set(sampled)) == 1 else sum(sampled) % self._vocab_size)
        self._front.send(
            {
                "kind": messages.FIGURES,
                "usage": 1 - len(self._free) / self._num_blocks,
                "queried": 0,
                "hit": 0,
                "preempted": self._num_preempted,
            }
        )

    def _ended(self, began_s: float, num_prefill: int, num_decodes: int, num_sequences: int) -> None:
        counts = {"num_prefill": num_prefill, "num_decodes": num_decodes, "num_sequences": num_sequences}
        self._link.send_late(messages.STEPPED, began=began_s, attended=num_prefill, **counts)

    def _sampled(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        num_said, added = len(request.token_ids) - request.num_prompt, request.added
        if token_id in added["sampling"]["stop"]:
            self._finish(request, "stop", [token_id])
        elif num_said >= added["max_tokens"] or len(request.token_ids) >= self._max_model_len:
            self._finish(request, "length", [token_id])
        else:
            self._front.send({"kind": messages.OUTPUT, "id": request.id, "tokens": [token_id], "finished": None})

    def _row(self, request: Request) -> JsonMessage:
        sampling = request.added["sampling"]
        position = len(request.token_ids) - sampling["num_prompt"]
        return {
            "id": request.id,
            "blocks": request.blocks,
            "num_tokens": len(request.token_ids),
            "position": position,
            "params": sampling["params"],
            "further": sampling["further"] if len(request.token_ids) == request.num_prompt else [],
            "masked": sampling["stop"] if position < sampling["min_tokens"] else [],
            "vocab": self._vocab_size,
        }

    def _grow(self, request: Request, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._block_size) - len(request.blocks)
        if missing > len(self._free):
            return False
        request.blocks = request.blocks + [self._free.pop(0) for _ in range(missing)]
        return True

    def _save(self, step: JsonMessage, request: Request) -> None:
        """Does what `inside.connector` does: full blocks of the prompt, and at its end the partial one."""
        kv, size = request.added["kv"], self._block_size
        num_tokens = min(request.num_computed, kv["num_exported"])
        is_whole = num_tokens == kv["num_exported"]
        end = -(-num_tokens // size) if is_whole else num_tokens // size
        first = max(request.num_saved, kv["num_imported"] // size)
        if end > first:
            request.num_saved = end
            blocks, slots = request.blocks[first:end], kv["slots"][first:end]
            num_final = num_tokens if is_whole else end * size
            step["saves"].append({"id": request.id, "blocks": blocks, "slots": slots, "num_tokens": num_final})
