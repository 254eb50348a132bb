"""Copies blocks of vLLM to the worker's slots and back. It is a `KVConnectorBase_V1` of vLLM.

On the scheduler's side it decides what is copied in a step, and tells the worker of steps; on each rank's side it
copies that rank's part. After a step, what it computed of a prompt is in the slots: full blocks, at the prompt's end
also the partial one, and what vLLM's prefix cache had. Nothing in vLLM ever waits for a slot to be read, and no block
of vLLM is held for one. A load is reported once, also if its request was given up meanwhile.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from services.vllm import messages
from services.vllm.inside.link import Link


@dataclass
class Copy:
    """Says which of vLLM's blocks and which slots belong together, in token order."""

    seq_id: int
    request_id: str
    block_ids: list[int]
    slots: list[int]
    num_tokens: int
    """Tokens of the prompt that are final, or loaded, afterwards."""


@dataclass
class StepCopies(KVConnectorMetadata):  # type: ignore[misc]
    """Says what every rank copies beside one step."""

    loads: list[Copy] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)


@dataclass
class _Request:
    """Is what the scheduler's side remembers of a request of the worker's."""

    seq_id: int
    num_prompt: int
    num_imported: int
    """Tokens at the prompt's start whose KV is in `slots`."""
    num_exported: int
    """Tokens of the prompt whose KV is wanted in `slots`."""
    slots: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_saved: int = 0
    """Blocks that are in `slots`, or will be after the step."""
    is_known: bool = False
    """Whether its blocks were allocated once."""


_WHOLE = "FullAttentionSpec"
"""VLLM's name of the only kind of KV cache that is handed over. Of other kinds, windows of attention among them, it
drops blocks of a running sequence, and names block 0 in the place of those that a prefix in its cache has no more."""
_WITHIN_WINDOW = "--engine-arg disable_sliding_window=true has a model whose attention has a window stay within it"
_LOAD_S = 0.004
"""Seconds for which blocks are loaded beside a step that computes: a tenth of a step on two cores of a CPU."""
_ALL_S = 1e9

_links: list[Link] = []
"""The link of this process's first rank, if it is here."""


def first_rank_link() -> Link | None:
    """Returns the connection of the first rank, if this is its process: all ranks sample alike, and it alone tells."""
    return _links[0] if _links else None


class BatonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._kv_cache_config = kv_cache_config
        path = self._kv_transfer_config.kv_connector_extra_config["socket"]
        if role is KVConnectorRole.WORKER:
            parallel = vllm_config.parallel_config
            self._num_ranks, rank = parallel.world_size, parallel.rank
            self._link = Link(path, messages.RANK, rank)
            if rank == parallel.world_size - parallel.tensor_parallel_size:  # the first of the last pipeline stage
                _links.append(self._link)
            self._loading: list[Copy] = []
            """Those that are not done, the oldest first, each with the blocks that are left."""
            self._loaded: set[str] = set()
            """Requests of loads that have ended, and were not reported yet."""
            self._failed: set[str] = set()
        else:
            self._link = Link(path, messages.CORE)
            self._requests: dict[str, _Request] = {}
            self._loads: list[Copy] = []
            self._step: dict[str, Any] = {"num_sequences": 0}
            """What the newest step computes."""

    # -- each rank -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Tells the worker of this rank's part of a block, and maps the slots that it makes then."""
        try:
            self._take_caches(kv_caches)
        except Exception as error:  # vLLM says only that a process of its own has not started
            self._link.send(messages.BROKEN, error=f"{type(error).__name__}: {error}")
            raise

    def _take_caches(self, kv_caches: dict[str, Tensor]) -> None:
        kinds = [type(group.kv_cache_spec).__name__ for group in self._kv_cache_config.kv_cache_groups]
        if kinds != [_WHOLE]:
            remedy = f"; {_WITHIN_WINDOW}" if any("Window" in kind for kind in kinds) else ""
            raise ValueError(
                f"vLLM keeps the model's KV as {', '.join(kinds) or 'nothing'}, and Baton hands over one {_WHOLE}, of "
                f"which all blocks stay{remedy}"
            )
        self._part = _Part(kv_caches, self._kv_cache_config.num_blocks)
        self._link.send(
            messages.CACHE,
            num_ranks=self._num_ranks,
            part_bytes=self._part.num_bytes,
            num_blocks=self._kv_cache_config.num_blocks - 1,  # vLLM keeps one for itself
            form=self._part.form,
            backend=_backend(),
        )
        message, descriptor = self._link.receive_with_descriptor()
        self._part.map(descriptor, **message["memory"])
        self._link.send(messages.MAPPED)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads a while beside a step that computes, the oldest request's blocks first, and all where none does: a long
        prompt's KV at once would hold up the tokens of all others."""
        self._loading += self._get_connector_metadata().loads
        until_s = time.monotonic() + (_LOAD_S if forward_context.attn_metadata is not None else _ALL_S)
        while self._loading and time.monotonic() < until_s:
            load = self._loading[0]
            try:
                while load.block_ids and time.monotonic() < until_s:
                    self._part.load(load.block_ids.pop(), load.slots.pop())
            except Exception as error:
                print(f"a load has failed: {error!r}", flush=True)
                self._failed.add(load.request_id)
                load.block_ids.clear()
            if not load.block_ids:
                self._loaded.add(load.request_id)
                del self._loading[0]

    def wait_for_save(self) -> None:
        for save in self._get_connector_metadata().saves:
            self._part.save(save.block_ids, save.slots)
            self._link.send(messages.SAVED, id=save.seq_id, num_tokens=save.num_tokens)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Reports each load once: of a request that was given up meanwhile too, the rest of which is not loaded. What
        it is told of finished requests it tells the worker: no step touches their slots from here on."""
        self._loaded.update(load.request_id for load in self._loading if load.request_id in finished_req_ids)
        self._loading = [load for load in self._loading if load.request_id not in finished_req_ids]
        if gone := [number for each in finished_req_ids if (number := _seq_id_of(each)) is not None]:
            self._link.send(messages.GONE, ids=gone)
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        known = self._known(request)
        if known is None or known.is_known:
            return 0, False
        missing = known.num_imported - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        known = self._known(request)
        if known is None or known.is_known:
            return
        known.is_known = True
        if num_external_tokens > 0:
            first = (known.num_imported - num_external_tokens) // self._block_size
            end = -(-known.num_imported // self._block_size)
            ids = blocks.get_block_ids()[0]
            self._loads.append(
                Copy(known.seq_id, request.request_id, ids[first:end], known.slots[first:end], known.num_imported)
            )

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        copies = StepCopies(loads=self._loads)
        self._loads = []
        scheduled = scheduler_output.num_scheduled_tokens
        begun, num_prefill, num_decodes, attended = [], 0, 0, 0
        for new in scheduler_output.scheduled_new_reqs:
            num_tokens, start = scheduled[new.req_id], new.num_computed_tokens
            num_prefill += num_tokens
            attended += _attended(start, num_tokens)
            if (known := self._requests.get(new.req_id)) is not None:
                begun.append([known.seq_id, start])
                known.block_ids = list(new.block_ids[0])
                self._save(copies, new.req_id, known, start + num_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            num_tokens, start = scheduled[request_id], cached.num_computed_tokens[at]
            attended += _attended(start, num_tokens)
            known = self._requests.get(request_id)
            if known is not None and start < known.num_prompt:
                num_prefill += num_tokens
            else:
                num_decodes += 1
            if known is None:
                continue
            if request_id in cached.resumed_req_ids:
                known.block_ids = []
            known.block_ids += (cached.new_block_ids[at] or ([],))[0]
            self._save(copies, request_id, known, start + num_tokens)
        preempted = [known.seq_id for each in scheduler_output.preempted_req_ids if (known := self._requests.get(each))]
        now = time.monotonic()
        if begun or preempted:
            self._link.send(messages.STEP, begun=begun, preempted=preempted)
        self._step = {
            "began": now,
            "num_prefill": num_prefill,
            "num_decodes": num_decodes,
            "num_sequences": len(scheduled),
            "attended": attended,
        }
        return copies

    def update_connector_output(self, connector_output: Any) -> None:
        if self._step["num_sequences"]:
            self._link.send_late(messages.STEPPED, **self._step)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def _known(self, request: Any) -> _Request | None:
        if (known := self._requests.get(request.request_id)) is not None:
            return known
        if not (params := request.kv_transfer_params):
            return None  # a request that warms up
        known = _Request(
            seq_id=params["id"],
            num_prompt=request.num_prompt_tokens,
            num_imported=params["num_imported"],
            num_exported=params["num_exported"],
            slots=params["slots"],
            num_saved=params["num_imported"] // self._block_size,
        )
        self._requests[request.request_id] = known
        return known

    def _save(self, copies: StepCopies, request_id: str, known: _Request, num_computed: int) -> None:
        """Adds what a step that computes up to token `num_computed` makes final of the prompt."""
        num_tokens = min(num_computed, known.num_exported)
        is_whole = num_tokens == known.num_exported
        end = -(-num_tokens // self._block_size) if is_whole else num_tokens // self._block_size
        first = known.num_saved
        if end > first:
            known.num_saved = end
            slots, block_ids = known.slots[first:end], known.block_ids[first:end]
            num_final = num_tokens if is_whole else end * self._block_size
            copies.saves.append(Copy(known.seq_id, request_id, block_ids, slots, num_final))


class _Part:
    """Is a rank's part of all blocks: its layers, and their copies in the slots one behind the other."""

    def __init__(self, kv_caches: dict[str, Tensor], num_blocks: int) -> None:
        self._layers: list[Tensor] = []
        seen: set[int] = set()
        for name, layer in kv_caches.items():
            if layer.data_ptr() in seen:
                continue  # layers that share their KV
            seen.add(layer.data_ptr())
            axes = [axis for axis, size in enumerate(layer.shape) if size == num_blocks]
            if not axes:
                raise ValueError(f"the KV of {name} has the shape {tuple(layer.shape)}, with no axis of blocks")
            self._layers.append(layer.movedim(axes[0], 0))
        first = self._layers[0]
        self._bytes_of = [layer[0].numel() * layer.element_size() for layer in self._layers]
        self.num_bytes = sum(self._bytes_of)
        self.form = f"{len(self._layers)} x {list(first.shape[1:])} {first.dtype}"

    def map(self, descriptor: int, *, num_slots: int, slot_bytes: int, offset: int) -> None:
        """Maps the slots, of which this rank's part begins `offset` bytes into each."""
        memory = mmap.mmap(descriptor, num_slots * slot_bytes)
        os.close(descriptor)
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, slot_bytes)
        if self._layers[0].device.type == "cuda":
            from services.engine.cpu.pinning import pin
            from services.kv.regions import Region

            pin(Region(whole.data_ptr(), whole.numel(), "cpu"))
        self._slots: list[Tensor] = []
        for layer, num_bytes in zip(self._layers, self._bytes_of, strict=True):
            self._slots.append(
                whole[:, offset : offset + num_bytes].view(layer.dtype).view(num_slots, *layer.shape[1:])
            )
            offset += num_bytes

    def save(self, block_ids: list[int], slots: list[int]) -> None:
        """Copies blocks to slots. They are there when it returns."""
        for layer, copy in self._pairs():
            for block_id, slot in zip(block_ids, slots, strict=True):
                copy[slot].copy_(layer[block_id])

    def load(self, block_id: int, slot: int) -> None:
        """Copies a slot to a block. It is there when it returns."""
        for layer, copy in self._pairs():
            layer[block_id].copy_(copy[slot])

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._layers, self._slots, strict=True)


def _backend() -> str:
    """Returns how attention is computed on this rank, and by which instructions: others keep KV in another form."""
    from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform

    config = get_current_vllm_config_or_none()
    layers = get_layers_from_vllm_config(config, AttentionLayerBase) if config is not None else {}
    backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
    return f"{'/'.join(backends) or 'attention'} on {current_platform.get_device_name()}{_instructions(config)}"


def _instructions(config: Any) -> str:
    """Returns the instructions of which attention on a CPU makes use, which decide the form of its KV."""
    if config is None or config.device_config.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return f" {_get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)}"


def _attended(start: int, num_tokens: int) -> int:
    """Returns the sum of what tokens from place `start` on attend to."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def _seq_id_of(request_id: str) -> int | None:
    """Returns the worker's number of a request; None for one of the warm-up. vLLM adds letters of its own to it."""
    number = request_id.partition("-")[0]
    return int(number) if number.isdigit() else None
