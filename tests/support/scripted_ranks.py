"""Has the ranks of `scripted_vllm`: their blocks, and the copies to slots and back."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.vllm import messages
from services.vllm.inside.link import Link
from services.vllm.messages import JsonMessage
from tests.support.scripted_memory import next_token
from tests.support.scripted_vllm_controls import Controls

if TYPE_CHECKING:
    from tests.support.scripted_vllm import Pipe

_TOKEN_BYTES = 8


class Rank:
    """Keeps its part of each block: every rank has the ids of all tokens, in 8 bytes if it is alone, and else in 4."""

    def __init__(
        self, path: str, number: int, num_ranks: int, num_blocks: int, block_size: int, controls: Controls
    ) -> None:
        self._number, self._controls, self._block_size = number, controls, block_size
        self._format = "q" if num_ranks == 1 else "i"
        self._part_bytes = block_size * _TOKEN_BYTES // num_ranks
        self._blocks = bytearray(num_blocks * self._part_bytes)
        self._link = Link(path, messages.RANK, number)
        if controls.is_set("share"):
            self._share()
        self._link.send(
            messages.CACHE,
            num_ranks=num_ranks,
            part_bytes=self._part_bytes,
            num_blocks=num_blocks - 1,
            form=f"1 x [{block_size}, 1] torch.float32",
            backend="SCRIPTED on this machine",
        )
        message, descriptor = self._link.receive_with_descriptor()
        memory = message["memory"]
        self._slots = mmap.mmap(descriptor, memory["num_slots"] * memory["slot_bytes"])
        self._slot_bytes, self._offset = memory["slot_bytes"], memory["offset"]
        os.close(descriptor)
        self._link.send(messages.MAPPED)

    def _share(self) -> None:
        """Has shared memory as vLLM's ranks do."""
        path = Path(f"/dev/shm/scripted-{os.getpid()}")
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 4096)

    def wait_until_ready(self) -> None:
        """Is called of a rank in the core's process, where it is ready when it is made."""

    def serve(self, core: Pipe) -> None:
        core.send({"kind": "ready"})
        while True:
            core.send(self.step(core.receive()))

    def begin(self, step: JsonMessage) -> None:
        self._step = step

    def end(self) -> JsonMessage:
        return self.step(self._step)

    def step(self, step: JsonMessage) -> JsonMessage:
        """Does a rank's part of a step, and returns what it has sampled and which loads have failed."""
        failed = [load["id"] for load in step["loads"] if not self._load(load)]
        for write in step["writes"]:
            for position, token_id in enumerate(write["tokens"], write["start"]):
                self._row(write["blocks"][position // self._block_size])[position % self._block_size] = token_id
        if step["saves"] and self._number == 1:
            self._controls.wait_while("hold-save")
        for save in step["saves"]:
            for block, slot in zip(save["blocks"], save["slots"], strict=True):
                at = slot * self._slot_bytes + self._offset
                self._slots[at : at + self._part_bytes] = self._row(block).tobytes()
            self._link.send(messages.SAVED, id=save["id"], num_tokens=save["num_tokens"])
        if step["gone"]:
            if self._number == 1:
                self._controls.wait_while("hold-last-gone")
            self._link.send(messages.GONE, ids=step["gone"])
        return {"sampled": [self._sample(each) for each in step["samples"]], "failed": failed}

    def _sample(self, row: JsonMessage) -> int:
        """Returns the token after those in the row's blocks. The first rank tells what is told beside it."""
        there = self._read(row["blocks"], row["num_tokens"])
        token_ids = [_pick(there, params, row["masked"], row["vocab"]) for params in (row["params"], *row["further"])]
        if self._number == 0 and (row["further"] or row["params"]["num_logprobs"] is not None):
            told = [[token_id, *_logprobs(token_id, row["params"]["num_logprobs"])] for token_id in token_ids]
            self._link.send(messages.SAMPLED, id=row["id"], position=row["position"], tokens=told)
        return token_ids[0]

    def _load(self, load: JsonMessage) -> bool:
        self._controls.wait_while("hold-load")
        fails = self._number == 0 and self._controls.take("fail-load")
        for block, slot in zip(load["blocks"], load["slots"], strict=True):
            at = slot * self._slot_bytes + self._offset
            if not fails:
                self._row(block).cast("B")[:] = self._slots[at : at + self._part_bytes]
        return not fails

    def _read(self, blocks: list[int], num_tokens: int) -> list[int]:
        size = self._block_size
        return [self._row(blocks[at // size])[at % size] for at in range(num_tokens)]

    def _row(self, block: int) -> memoryview:
        part = memoryview(self._blocks)[block * self._part_bytes : (block + 1) * self._part_bytes]
        return part.cast(self._format)  # type: ignore[call-overload, no-any-return]


class OtherRank:
    """Is a rank in a process of its own."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def wait_until_ready(self) -> None:
        self._pipe.receive()

    def begin(self, step: JsonMessage) -> None:
        self._pipe.send(step)

    def end(self) -> JsonMessage:
        return self._pipe.receive()


def _pick(token_ids: list[int], params: JsonMessage, masked: list[int], vocab_size: int) -> int:
    seen = token_ids if params["temperature"] == 0 else [*token_ids, params["seed"] % (1 << 62)]
    while (token_id := next_token(seen, vocab_size)) in masked:
        seen = [*seen, token_id]
    return token_id


def logprob_of(token_id: int) -> float:
    """Returns what stands for the log-probability of a token."""
    return -0.5 - token_id / 1024


def _logprobs(token_id: int, most: int | None) -> list[Any]:
    if most is None:
        return [None, []]
    top = [token_id + at for at in range(most)]
    return [logprob_of(token_id), [[each, logprob_of(each)] for each in top]]
