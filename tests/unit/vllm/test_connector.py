"""Tests the connector that runs in vLLM, called as vLLM calls it: which blocks are copied when, and that each load is
reported once, whatever becomes of its request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.vllm import messages
from services.vllm.messages import JsonMessage
from tests.support.fake_vllm_package import Role, inside

BLOCK, NUM_BLOCKS, NUM_SLOTS = 4, 16, 12
LAYERS = "layer.0", "layer.1"
ELEMENTS = 2
"""Of a token in a layer."""


class FullAttentionSpec:
    """Has vLLM's name, by which the connector knows it."""


class SlidingWindowSpec:
    pass


class MambaSpec:
    pass


class Link:
    """Keeps what is sent to the worker, and has the slots for a rank."""

    def __init__(self, path: str, who: str, rank: int = 0) -> None:
        self.sent: list[JsonMessage] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})

    send_late = send

    def receive_with_descriptor(self) -> tuple[JsonMessage, int]:
        slot_bytes = len(LAYERS) * BLOCK * ELEMENTS * 4
        descriptor = os.memfd_create("slots")
        os.ftruncate(descriptor, NUM_SLOTS * slot_bytes)
        return {"memory": {"num_slots": NUM_SLOTS, "slot_bytes": slot_bytes, "offset": 0}}, descriptor

    def of(self, kind: str) -> list[JsonMessage]:
        return [message for message in self.sent if message["kind"] == kind]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with inside("connector") as module:
        module.Link = Link
        yield module


def request(number: int, num_tokens: int, *, imported: int = 0, exported: int = 0, slots: list[int]) -> Any:
    kv = {"id": number, "num_imported": imported, "num_exported": exported, "slots": slots}
    return SimpleNamespace(request_id=f"{number}-abc", num_prompt_tokens=num_tokens, kv_transfer_params=kv)


class Vllm:
    """Calls the connector of a scheduler and that of a rank, whose blocks hold their own numbers at first."""

    def __init__(self, module: Any, *kinds: type) -> None:
        groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
        cache = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(world_size=1, rank=0, tensor_parallel_size=1),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"socket": "none"}),
        )
        self.scheduler = module.BatonConnector(config, Role.SCHEDULER, cache)
        self.rank = module.BatonConnector(config, Role.WORKER, cache)
        self.blocks = {
            name: torch.arange(NUM_BLOCKS).view(-1, 1, 1).expand(-1, BLOCK, ELEMENTS).float().clone() for name in LAYERS
        }

    def register(self) -> Vllm:
        self.rank.register_kv_caches(self.blocks)
        return self

    @property
    def told(self) -> Link:
        link: Link = self.rank._link
        return link

    def slots(self, layer: int = 0) -> list[int]:
        """Returns which block's content each slot has; 0 has none."""
        return [int(slot.mean()) for slot in self.rank._part._slots[layer]]

    def allocate(self, request: Any, block_ids: list[int], *, num_local: int = 0) -> int:
        """Returns how many tokens the request waits for, once it has its blocks."""
        missing, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local)
        assert is_async == bool(missing)
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (block_ids,)), missing)
        assert isinstance(missing, int)
        return missing

    def step(
        self,
        new: list[tuple[Any, list[int], int, int]] | None = None,
        cached: list[tuple[Any, list[int], int, int]] | None = None,
        *,
        resumed: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> Any:
        """Runs a step over requests with their new blocks, computed tokens and tokens of this step."""
        new, cached = new or [], cached or []
        self.rank.bind_connector_metadata(
            self.scheduler.build_connector_meta(
                SimpleNamespace(
                    num_scheduled_tokens={each.request_id: num for each, _, _, num in (*new, *cached)},
                    scheduled_new_reqs=[
                        SimpleNamespace(req_id=each.request_id, num_computed_tokens=start, block_ids=(block_ids,))
                        for each, block_ids, start, _ in new
                    ],
                    scheduled_cached_reqs=SimpleNamespace(
                        req_ids=[each.request_id for each, *_ in cached],
                        num_computed_tokens=[start for _, _, start, _ in cached],
                        new_block_ids=[(block_ids,) if block_ids else None for _, block_ids, _, _ in cached],
                        resumed_req_ids=set(resumed),
                    ),
                    preempted_req_ids=set(preempted),
                )
            )
        )
        self.rank.start_load_kv(SimpleNamespace(attn_metadata=object() if new or cached else None))
        self.rank.wait_for_save()
        return self.rank.get_transfer_results(set(finished))


@pytest.fixture
def vllm(module: Any) -> Vllm:
    return Vllm(module, FullAttentionSpec).register()


def saved(vllm: Vllm) -> list[int]:
    return [message["num_tokens"] for message in vllm.told.of(messages.SAVED)]


@pytest.mark.parametrize("kinds", [(SlidingWindowSpec,), (MambaSpec,), (FullAttentionSpec, MambaSpec), ()])
def test_a_model_whose_blocks_are_not_all_kept_is_refused_by_the_kind(module: Any, kinds: tuple[type, ...]) -> None:
    """Of a window vLLM keeps the last blocks, and names block 0 in the place of the others: what lies there is of
    nobody's, and would be handed over as the beginning of a prompt."""
    vllm = Vllm(module, *kinds)
    with pytest.raises(ValueError, match="Baton hands over"):
        vllm.register()
    (broken,) = vllm.told.of(messages.BROKEN)
    assert all(kind.__name__ in broken["error"] for kind in kinds)
    assert ("disable_sliding_window" in broken["error"]) == (SlidingWindowSpec in kinds)
    assert not vllm.told.of(messages.CACHE)


def test_a_prompt_is_saved_as_it_is_computed_and_at_its_end_the_partial_block(vllm: Vllm) -> None:
    prompt = request(7, 10, exported=10, slots=[3, 5, 8])
    assert vllm.allocate(prompt, [1, 2, 4]) == 0
    vllm.step([(prompt, [1, 2], 0, 6)])
    assert saved(vllm) == [4], "a full block"
    vllm.step(cached=[(prompt, [4], 6, 4)])
    assert saved(vllm) == [4, 10]
    vllm.step(cached=[(prompt, [], 10, 1)])
    assert saved(vllm) == [4, 10], "what it says is nobody's"
    for layer in range(len(LAYERS)):
        assert {at: block for at, block in enumerate(vllm.slots(layer)) if block} == {3: 1, 5: 2, 8: 4}


def test_what_vllm_had_of_a_prompt_is_saved_too(vllm: Vllm) -> None:
    prompt = request(7, 10, exported=10, slots=[0, 1, 2])
    vllm.allocate(prompt, [9, 10, 11], num_local=8)
    vllm.step([(prompt, [9, 10, 11], 8, 2)])
    assert saved(vllm) == [10]
    assert vllm.slots()[:3] == [9, 10, 11]


def test_what_was_loaded_is_not_saved_again(vllm: Vllm) -> None:
    prompt = request(7, 10, imported=4, exported=10, slots=[0, 1, 2])
    assert vllm.allocate(prompt, [9, 10, 11]) == 4
    vllm.step()
    vllm.blocks[LAYERS[0]][9] = 70  # others may read the slot
    vllm.step([(prompt, [9, 10, 11], 4, 6)])
    assert vllm.slots()[:3] == [0, 10, 11]


def loading(vllm: Vllm, number: int = 7) -> Any:
    """Returns a request whose whole prompt of 2 blocks and a half is to be loaded."""
    vllm.rank._part._slots[0][:3] = torch.tensor([51.0, 52.0, 53.0]).view(-1, 1, 1)
    taken = request(number, 11, imported=10, slots=[0, 1, 2])
    assert vllm.allocate(taken, [9, 10, 11]) == 10
    return taken


def loaded(vllm: Vllm) -> list[int]:
    return [int(vllm.blocks[LAYERS[0]][block_id].mean()) for block_id in (9, 10, 11)]


def test_a_load_is_reported_once(vllm: Vllm) -> None:
    taken = loading(vllm)
    assert vllm.step().finished_recving == {taken.request_id}
    assert loaded(vllm) == [51, 52, 53]
    assert vllm.allocate(taken, [9, 10, 11], num_local=10) == 0, "it is asked for again"
    assert not vllm.step([(taken, [9, 10, 11], 10, 1)]).finished_recving
    assert not vllm.step(finished=(taken.request_id,)).finished_recving
    assert vllm.told.of(messages.GONE) == [{"kind": messages.GONE, "ids": [7]}]


def test_only_what_vllm_has_not_is_loaded(vllm: Vllm) -> None:
    vllm.rank._part._slots[0][:3] = torch.tensor([51.0, 52.0, 53.0]).view(-1, 1, 1)
    taken = request(7, 11, imported=10, slots=[0, 1, 2])
    assert vllm.allocate(taken, [9, 10, 11], num_local=4) == 6
    vllm.step()
    assert loaded(vllm) == [9, 52, 53]


@pytest.fixture
def no_time(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps that compute load nothing."""
    monkeypatch.setattr(module, "_LOAD_S", -1.0)


@pytest.mark.usefixtures("no_time")
def test_an_aborted_load_is_reported_once_and_not_gone_on_with(vllm: Vllm) -> None:
    other = request(8, 4, exported=4, slots=[6])
    taken, next_one = loading(vllm, 7), loading(vllm, 9)
    assert not vllm.step([(other, [3], 0, 4)]).finished_recving, "both wait"
    results = vllm.step(cached=[(other, [], 4, 1)], finished=(taken.request_id,))
    assert results.finished_recving == {taken.request_id}
    assert not results.failed_recving
    assert loaded(vllm) == [9, 10, 11], "its blocks may be another's from here on"
    assert vllm.step().finished_recving == {next_one.request_id}
    assert not vllm.step(finished=(taken.request_id,)).finished_recving


def test_a_load_that_ends_in_the_step_of_its_abort_is_reported_once(vllm: Vllm) -> None:
    taken = loading(vllm)
    assert vllm.step(finished=(taken.request_id,)).finished_recving == {taken.request_id}
    assert not vllm.step().finished_recving


def test_a_load_that_fails_is_reported_once_and_the_next_one_is_loaded(vllm: Vllm) -> None:
    failing = request(6, 11, imported=10, slots=[0, NUM_SLOTS, 2])
    assert vllm.allocate(failing, [12, 13, 14]) == 10
    taken = loading(vllm)
    results = vllm.step()
    assert results.failed_recving == {failing.request_id}
    assert results.finished_recving == {failing.request_id, taken.request_id}
    results = vllm.step(finished=(failing.request_id,))
    assert not results.failed_recving
    assert not results.finished_recving


def test_a_finished_request_holds_no_block(vllm: Vllm) -> None:
    prompt = request(7, 10, exported=10, slots=[3, 5, 8])
    vllm.allocate(prompt, [1, 2, 4])
    vllm.step([(prompt, [1, 2, 4], 0, 10)])
    assert vllm.scheduler.request_finished(prompt, [1, 2, 4]) == (False, None)
    vllm.step(finished=(prompt.request_id, "warm-16-abc"))
    assert vllm.told.of(messages.GONE) == [{"kind": messages.GONE, "ids": [7]}], "of the warm-up nobody is told"


def test_who_loses_its_blocks_is_told_of_and_loads_nothing_again(vllm: Vllm) -> None:
    taken = loading(vllm)
    vllm.step()
    vllm.step([(taken, [9, 10, 11], 10, 1)])
    vllm.step(preempted=(taken.request_id,))
    assert vllm.allocate(taken, [1, 2, 3]) == 0
    vllm.step(cached=[(taken, [1, 2, 3], 0, 11)], resumed=(taken.request_id,))
    steps = [message for message in vllm.scheduler._link.sent if message["kind"] == messages.STEP]
    assert [(step["begun"], step["preempted"]) for step in steps] == [([[7, 10]], []), ([], [7])]
