"""Tests from whom a store learns its layout, and when that is of no more use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.core.clock import MonotonicClock
from services.core.errors import ConfigError
from services.kv.layout import Layout
from services.kvtransfer.wire import layout_from_proto, layout_to_proto
from services.store.learning import chosen, computes, is_sound, learn, outlived
from services.store.main import info_of
from tests.support.patience import HANG_S


def worker(worker_id: str, weights: str = "a", model: str = "m", **facts: Any) -> control_pb2.WorkerDescription:
    layout = Layout(model, weights, "c", "float32", 2, 1, 8, 16, **facts)
    return control_pb2.WorkerDescription(
        worker_id=worker_id,
        roles=[types_pb2.WORKER_ROLE_DECODE],
        layout=layout_to_proto(layout),
        fingerprint=types_pb2.Fingerprint(kv=layout.fingerprint, numerics="n"),
        vocab_size=100,
        max_model_len=4096,
    )


class FakeTeachers:
    """Answers with one list of workers after the other; the last stays."""

    def __init__(self, *answers: list[control_pb2.WorkerDescription]) -> None:
        self.answers = list(answers)

    async def workers(self) -> list[control_pb2.WorkerDescription]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def any_(value: object) -> Any:
    return value


def test_it_keeps_the_layout_that_most_workers_of_its_model_have() -> None:
    workers = [worker("b", "new"), worker("c", "new"), worker("a", "old"), worker("0", "x", model="other")]
    found = chosen(workers, "m")
    assert found is not None
    assert found.layout.weights_digest == "new"


def test_without_a_model_it_is_that_of_the_first_worker_by_name() -> None:
    found = chosen([worker("b"), worker("a", model="other")], "")
    assert found is not None
    assert found.worker_id == "a"
    assert chosen([], "") is None
    assert chosen([worker("b")], "other") is None


def test_it_keeps_the_kv_of_one_engine_and_says_of_which() -> None:
    found = chosen([worker("t"), worker("v0", engine="vllm"), worker("v1", engine="vllm")], "m")
    assert found is not None
    assert is_sound(found)
    assert info_of(found, 1 << 20).engine == "vllm"


def test_a_store_is_nobody_to_learn_from() -> None:
    store = worker("s")
    store.roles[:] = [types_pb2.WORKER_ROLE_STORE]
    assert not computes(store)
    assert computes(worker("w"))


def test_what_contradicts_itself_is_not_learnt() -> None:
    assert is_sound(worker("a"))
    unknown_type, zero, lying = worker("a"), worker("a"), worker("a")
    unknown_type.layout.dtype = "float3"
    zero.layout.num_layers = 0
    lying.layout.weights_digest = "b"
    assert not any(map(is_sound, (unknown_type, zero, lying)))


async def test_it_waits_for_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.learning._ASK_EVERY_S", 0.001)
    teachers = FakeTeachers([], [worker("a", model="other")], [worker("a"), worker("b", model="other")])
    assert (await learn(any_(teachers), "m")).worker_id == "a"


async def test_it_is_outlived_only_while_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.store.learning._ASK_EVERY_S", 0.001)
    old, new = worker("a", "old"), worker("b", "new")
    layout, clock = layout_from_proto(old.layout), MonotonicClock()
    nobody_else = ([old], [old, new], [])
    for still_there in nobody_else:
        task = asyncio.create_task(outlived(any_(FakeTeachers(still_there)), layout, "m", after_s=0.01, clock=clock))
        done, _ = await asyncio.wait({task}, timeout=0.1)
        assert not done
        task.cancel()
    async with asyncio.timeout(HANG_S):
        await outlived(any_(FakeTeachers([old], [new])), layout, "m", after_s=0.01, clock=clock)


def test_its_description_is_the_workers_with_its_own_blocks() -> None:
    layout = layout_from_proto(worker("a").layout)
    info = info_of(worker("a"), 100 * layout.block_bytes + 1)
    assert (info.num_blocks, info.max_model_len, info.vocab_size, info.numerics) == (100, 1600, 100, "n")
    assert info.weights_digest == layout.weights_digest


def test_memory_for_too_few_blocks_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--kvtransfer-bytes"):
        info_of(worker("a"), 1000)
